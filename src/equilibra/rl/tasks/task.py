"""Task: a source of problems with answers that can be checked.

A task is a pure function of its seed and a number: every rank and every resumed run gets the same problem for the same
number, and none has to be told what the others took. Training problems go on for ever; held-out ones are a fixed set
that is never trained on. The two sides are told apart by a hash of the prompt text, which needs no list of what is on
which side and puts copies of a problem on the same side.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from equilibra.core.errors import InputError

__all__ = [
    "JudgedTask", "Problem", "RewardFunction", "Task", "UserScorer", "WrappedTask", "check_number", "check_share",
    "hash_of_prompt", "judged", "reward_function",
]  # fmt: skip


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

    @property
    def num_held_out(self) -> int:
        """How many held-out problems there are."""

    def problem(self, number: int) -> Problem:
        """A training problem, for any number from 0 on."""

    def held_out(self, number: int) -> Problem:
        """One of the problems whose prompts never occur in training; number 0 to num_held_out - 1."""

    def reward(self, problem: Problem, answer_text: str) -> float:
        """How good the answer is, 0 to 1."""


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


# A user's own reward is one function `score(prompt, answer, expected)` that returns a number from 0 to 1. It is named
# "path/to/file.py:score" or "package.module:score".


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's function; `reward_function` finds it."""

    named: str
    """how the user named it"""
    function: Callable[[str, str, str], Any]
    """prompt, answer, expected answer -> 0 to 1"""

    def __call__(self, task: str, problem: Problem, answer_text: str) -> float:
        """What the function says of an answer."""
        about = f"the reward {self.named} for problem {problem.number} of {task}"
        try:
            value = self.function(problem.prompt, answer_text, problem.answer)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise InputError(f"{about} raised {type(error).__name__}: {error}; mend the function") from error
        if not isinstance(value, Real | np.bool_):
            raise InputError(f"{about} is {value!r:.60}: it must be a number from 0 to 1; return float(...)")
        if not 0 <= float(value) <= 1:  # also NaN
            raise InputError(f"{about} is {value}: it must be from 0 to 1; scale it")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class JudgedTask(WrappedTask):
    """A task whose answers are judged by a user's function."""

    task: Task
    """where the problems come from"""
    judge: RewardFunction
    """how good answers are"""

    def reward(self, problem: Problem, answer_text: str) -> float:
        """What the function says."""
        return self.judge(self.name, problem, answer_text)


@dataclass(frozen=True, kw_only=True)
class UserScorer:
    """A user's function by its name alone, so that it can be found in another process."""

    task: str
    """name of the task, for messages"""
    judge: RewardFunction
    """the function"""

    @classmethod
    def of(cls, task: str, named: str) -> UserScorer:
        """The function that a name stands for."""
        return cls(task=task, judge=reward_function(named))

    def reward(self, problem: Problem, answer_text: str) -> float:
        """What the function says."""
        return self.judge(self.task, problem, answer_text)


def judged(task: Task, reward: RewardFunction | None) -> Task:
    """The task with a user's reward, if there is one."""
    return task if reward is None else JudgedTask(task=task, judge=reward)


def reward_function(named: str) -> RewardFunction:
    """The function that "path/to/file.py:function" or "package.module:function" names."""
    place, _, name = named.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(
            f"cannot find the reward {named!r}: name it like path/to/file.py:function or package.module:function"
        )
    module = _from_file(Path(place)) if place.endswith(".py") or "/" in place else _from_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = ", ".join(get_close_matches(name, own, cutoff=0.4) or own[:8]) or "none"
        raise InputError(f"cannot use the reward {named!r}: {place} has no function {name!r}; it has {near}")
    try:
        inspect.signature(function).bind("prompt", "answer", "expected")
    except TypeError as error:
        raise InputError(
            f"cannot use the reward {named!r}: it is called as {name}(prompt, answer, expected), and {error}"
        ) from error
    except ValueError:  # a builtin that does not tell its arguments
        pass
    return RewardFunction(named=named, function=function)


def _from_file(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"cannot read the reward's file {path}: it must be a file whose name ends in .py")
    name = "equilibra_reward_" + hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise InputError(f"cannot load the reward's file {path}: {type(error).__name__}: {error}") from error
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise InputError(
            f"cannot import the reward's module {name!r}: {type(error).__name__}: {error}; install it, or name a file"
        ) from error
