"""Tasks: sources of problems whose answers can be checked, users' own rewards, and rewards with a time limit.

A task is a pure function of its seed and a problem number, so all ranks and resumed runs agree without communication.
Training problems are unlimited; held-out ones are a fixed set that is never trained on. A hash of the prompt tells the
two apart, so duplicates of a problem are on the same side.

A user's own reward is one function `score(prompt, answer, expected)` that returns a number from 0 to 1. It is named
"path/to/file.py:score" or "package.module:score".

A scorer may run forever on a model's answer, for example when it simplifies an expression. Only killing its process
ends it for certain. So `TimedTask` scores in a separate process, which is killed and replaced when it takes too long;
that answer gets no reward. `subprocess` starts it, because ranks are daemonic and have threads.

    task = TimedTask(task, partial(reasoning_gym_task, "countdown"), limit_s=30.0)
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from equilibra.core.errors import ExecuteError, InputError

ALONE_S = 10.0
"""seconds after the limit in which a scorer that lost its rank ends itself"""
START_S = 300.0
"""seconds in which a scorer must load its libraries"""
HELD = (signal.SIGINT, signal.SIGTERM)
"""signals that go to the whole job; scorers block them, because the step under way still needs its rewards"""
BOOT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from equilibra.rl.tasks import serve
serve(pipe)
"""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt and its right answer."""

    number: int
    """number among the task's training or held-out problems"""
    prompt: str
    """text that the model is given"""
    answer: str
    """a right answer, possibly with its derivation; empty if the task can only check answers"""
    metadata: object = field(default=None, compare=False, repr=False)
    """data that the task needs for the reward"""


class Task(Protocol):
    """A source of problems, the same on every rank."""

    @property
    def name(self) -> str:
        """Name in messages and recordings."""

    @property
    def num_held_out(self) -> int: ...

    def problem(self, number: int) -> Problem:
        """A training problem; any number from 0."""

    def held_out(self, number: int) -> Problem:
        """A problem whose prompt never occurs in training; 0 to num_held_out - 1."""

    def reward(self, problem: Problem, answer_text: str) -> float:
        """Reward of the answer, 0 to 1."""


def hash_of_prompt(prompt: str) -> int:
    """A 64-bit hash of the text, equal on every machine."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")


def check_number(task: str, number: int, num_held_out: int | None = None) -> None:
    """Refuse a problem number out of range; give `num_held_out` for held-out problems."""
    if number < 0:
        raise InputError(f"{task} has no problem {number}: numbers start at 0")
    if num_held_out is not None and number >= num_held_out:
        raise InputError(f"{task} has no held-out problem {number}: it has {num_held_out}, numbered from 0")


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's reward function; found by `reward_function`."""

    named: str
    """file.py:function or module:function"""
    function: Callable[[str, str, str], Any]
    """(prompt, answer, expected answer) -> 0 to 1"""
    task: str = "the task"
    """name of the task in messages"""

    def reward(self, problem: Problem, answer_text: str) -> float:
        about = f"the reward {self.named} for problem {problem.number} of {self.task}"
        try:
            value = self.function(problem.prompt, answer_text, problem.answer)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise InputError(f"{about} raised {type(error).__name__}: {error}; fix the function") from error
        if not isinstance(value, Real | np.bool_):
            raise InputError(f"{about} is {value!r:.60}: it must be a number from 0 to 1; return float(...)")
        if not 0 <= float(value) <= 1:  # also NaN
            raise InputError(f"{about} is {value}: it must be from 0 to 1; scale it")
        return float(value)


def reward_function(named: str, task: str = "the task") -> RewardFunction:
    """Find "path/to/file.py:function" or "package.module:function". task: its name in messages."""
    place, _, name = named.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"cannot find the reward {named!r}: write path/to/file.py:function or package.module:function")
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
    except ValueError:  # a builtin without a signature
        pass
    return RewardFunction(named=named, function=function, task=task)


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


_Said = tuple[float, str]
"""a message of the scorer: a score, 0 when it is ready; or why there is none"""


@dataclass(eq=False)
class _Running:
    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class TimedTask:
    """A task whose rewards come from a process with a time limit."""

    def __init__(self, task: Task, make: Callable[[], Task | RewardFunction], *, limit_s: float) -> None:
        """make: makes the scorer, in its process; must be picklable."""
        self.task, self.limit_s = task, limit_s
        self._make, self._unscored = make, 0
        self._running = self._started()

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def num_held_out(self) -> int:
        return self.task.num_held_out

    def problem(self, number: int) -> Problem:
        return self.task.problem(number)

    def held_out(self, number: int) -> Problem:
        return self.task.held_out(number)

    def reward(self, problem: Problem, answer_text: str) -> float:
        """The scorer's reward; 0 for an answer that exceeds the time limit or crashes the scorer."""
        self._wait_until_ready()
        try:
            self._running.pipe.send((problem, answer_text))
            if self._running.pipe.poll(self.limit_s):
                return _score(self._running.pipe.recv())
            why = f"was not scored within {self.limit_s:g} s"
        except (EOFError, OSError):
            why = "ended the scorer's process"
        self._unscored += 1
        print(
            f"an answer to problem {problem.number} of {self.name} {why}, no reward: {answer_text!r:.600}", flush=True
        )
        self._running.end()
        self._running = self._started()
        return 0.0

    def take_unscored(self) -> int:
        """Answers since the last call that got no reward because scoring did not end."""
        found, self._unscored = self._unscored, 0
        return found

    def close(self) -> None:
        self._running.end()

    def __del__(self) -> None:
        if hasattr(self, "_running"):
            self._running.end()

    def _started(self) -> _Running:
        mine, theirs = Pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # the process inherits it
        try:
            process = subprocess.Popen(  # noqa: S603 - this Python runs BOOT
                [sys.executable, "-c", BOOT, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        mine.send(sys.path)
        mine.send((self._make, self.limit_s))
        return _Running(process, mine)

    def _wait_until_ready(self) -> None:
        if self._running.ready:
            return
        try:
            said = self._running.pipe.recv() if self._running.pipe.poll(START_S) else None
        except (EOFError, OSError):
            said = None
        if said is None:
            self._running.end()
            raise ExecuteError(
                f"the process that scores answers of {self.name} ended or was not ready within {START_S:g} s: see its "
                "output, beside the rank's"
            )
        _score(said)
        self._running.ready = True


def _score(said: _Said) -> float:
    score, refused = said
    if refused:
        raise InputError(refused)
    return score


def serve(pipe: Connection) -> None:
    """Score answers in the scorer's process until the pipe closes."""
    make, limit_s = pipe.recv()
    try:
        scorer: Task | RewardFunction = make()
        pipe.send((0.0, ""))
        while True:
            problem, answer_text = pipe.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_s + ALONE_S)  # ends us even without the rank
            score = scorer.reward(problem, answer_text)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            pipe.send((score, ""))
    except InputError as error:
        pipe.send((0.0, str(error)))
    except (EOFError, OSError):
        pass
