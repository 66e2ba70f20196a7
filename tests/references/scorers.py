"""Scorers that answers can stall, end or break; and a user's reward that one kind of answer stalls."""

import os

from equilibra.core.errors import InputError

STALLS = "9**9**9**9"
"""computing it takes longer than any test, in C, where nothing inside the process can stop it"""


class Hostile:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def reward(self, problem, answer_text):
        if answer_text == "exit":
            os._exit(3)
        if answer_text == "refused":
            raise InputError("the reward of problem 7 is nan")
        return self.scale * float(eval(answer_text))


def broken():
    raise InputError("no such dataset")


def stalls_on_some(prompt, answer, expected):
    """As `tests.distributed.spread_reward`, but five answers of seven stall it."""
    found = sum(answer.encode()) % 7
    return eval(STALLS) if found < 5 else found / 6
