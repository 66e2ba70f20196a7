"""Task: a source of problems with answers that can be checked.

A task is a pure function of its seed and a number: every rank and every resumed run gets the same problem for the same
number, and none has to be told what the others took. Training problems go on for ever; held-out ones are a fixed set
that is never trained on. The two sides are told apart by a hash of the prompt text, which needs no list of what is on
which side and puts copies of a problem on the same side.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

from equilibra.core.errors import InputError

__all__ = ["Problem", "Task", "WrappedTask", "check_number", "check_share", "hash_of_prompt"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, and what is known of its answer."""

    number: int
    """in its task, among training or held-out problems"""
    prompt: str
    """what the model is given"""
    answer: str
    """a right answer as the task writes it, perhaps with the way to it; empty if the task only checks answers"""
    metadata: object = field(default=None, compare=False, repr=False)
    """whatever the task needs for the reward"""


class Task(Protocol):
    """A source of problems, the same on every rank."""

    @property
    def name(self) -> str:
        """For people and for recordings."""
        ...

    @property
    def num_held_out(self) -> int:
        """How many held-out problems there are."""
        ...

    def problem(self, number: int) -> Problem:
        """A training problem, for any number from 0 on."""
        ...

    def held_out(self, number: int) -> Problem:
        """One of the problems whose prompts never occur in training; number 0 to num_held_out - 1."""
        ...

    def reward(self, problem: Problem, answer_text: str) -> float:
        """How good the answer is, 0 to 1."""
        ...


class WrappedTask:
    """The problems of another task; whoever inherits from it gives the rewards."""

    task: Task

    @property
    def name(self) -> str:
        """The task's."""
        return self.task.name

    @property
    def num_held_out(self) -> int:
        """The task's."""
        return self.task.num_held_out

    def problem(self, number: int) -> Problem:
        """The task's."""
        return self.task.problem(number)

    def held_out(self, number: int) -> Problem:
        """The task's."""
        return self.task.held_out(number)


def hash_of_prompt(prompt: str) -> int:
    """A number from 0 to 2^64 - 1 that depends on nothing but the text."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")


def check_number(task: str, number: int, num_held_out: int | None = None) -> None:
    """Refuse numbers of problems that there are not; `num_held_out` if it is about a held-out one."""
    if number < 0:
        raise InputError(f"there is no problem {number} of {task}: numbers start at 0")
    if num_held_out is not None and number >= num_held_out:
        raise InputError(f"there is no held-out problem {number} of {task}: it has {num_held_out}, numbered from 0")


def check_share(share: float) -> None:
    """Refuse a share of held-out problems that leaves one side empty."""
    if not 0 < share < 1:
        raise InputError(f"the share of held-out problems must be above 0 and below 1, not {share}; 0.1 is usual")
