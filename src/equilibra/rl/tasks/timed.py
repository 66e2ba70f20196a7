"""Rewards with a time limit: answers are scored in a separate process, which is killed when it takes too long.

A scorer may run forever on a model's answer, for example when it simplifies an expression. Only killing its process
ends it for certain; the process is then replaced, and the answer gets no reward. `subprocess` starts it, because ranks
are daemonic and have threads.

    task = TimedTask(task, partial(reasoning_gym_task, "countdown"), limit_s=30.0)
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from equilibra.core.errors import ExecuteError, InputError
from equilibra.rl.tasks.task import Problem, Task

__all__ = ["Scorer", "TimedTask", "serve"]

ALONE_S = 10.0
"""seconds after the limit when a scorer without its rank ends itself"""
START_S = 300.0
"""seconds in which a scorer must load its libraries"""
HELD = (signal.SIGINT, signal.SIGTERM)
"""signals to the whole job, blocked here: the current step is finished, so its answers are still scored"""
BOOT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from equilibra.rl.tasks.timed import serve
serve(pipe)
"""


class Scorer(Protocol):
    """Scores answers: a task or a user's function."""

    def reward(self, problem: Problem, answer_text: str) -> float:
        """Reward of the answer, 0 to 1."""


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

    def __init__(self, task: Task, make: Callable[[], Scorer], *, limit_s: float) -> None:
        """make: makes the scorer in its process; must be picklable."""
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
        scorer: Scorer = make()
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
