"""Examine a node: hand jobs to a worker process one by one, and turn whatever becomes of it into findings.

A job that takes too long is killed with all it started; a worker that dies takes only its job with it. The next job
gets a new worker. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self

from equilibra.doctor.finding import Ask, Finding, Measured, State, Verdict, first_line
from equilibra.doctor.measure import GPU_MEASUREMENTS, HOST_MEASUREMENTS
from equilibra.doctor.streams import NAME as STREAMS
from equilibra.doctor.verdict import num_gpus, verdicts
from equilibra.doctor.worker import CHECKS, GPU, HOST

__all__ = ["Examination", "examine"]

Tell = Callable[[str, int, int], None]
"""what comes next, how many jobs are done, of how many"""

LIMIT_S = 60.0
"""for one job; checks that wait for something give up sooner by themselves"""
START_S = 60.0
"""more for the first job of a worker, which imports torch"""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Everything that was found."""

    findings: list[Finding]
    """in the order of the checks"""
    measured: list[Measured]
    """empty if nothing was to be measured"""
    verdicts: list[Verdict]
    """one per transfer path"""


class LostError(Exception):
    """The worker did not answer."""


class Worker:
    """A process that answers jobs; started when it is first needed, and again after it was lost."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "equilibra.doctor.worker"]
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._stderr.close()

    def do(self, job: str, ask: Ask, *, limit_s: float = LIMIT_S, start_s: float = START_S) -> dict[str, Any]:
        """The answer to a job; LostError if there is none within the limit."""
        question = json.dumps({"job": job, "ask": asdict(ask)})
        try:
            if self._process is None:
                self._process = self._started()
                limit_s += start_s
            assert self._process.stdin is not None
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
            found: dict[str, Any] = json.loads(self._line(limit_s))
        except (LostError, OSError, ValueError) as error:
            self.stop()
            raise LostError(str(error) or type(error).__name__) from error
        return found

    def stop(self) -> None:
        """End the process and all that it started."""
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # a worker that is gone reads no more
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        self._stderr.seek(0)
        self._stderr.truncate()
        return subprocess.Popen(  # noqa: S603 - this package
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )

    def _line(self, limit_s: float) -> bytes:
        """The next line of the worker."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(end - monotonic(), 0)):
                    raise LostError(f"did not end within {limit_s:.0f} s")
                part = os.read(pipe, 65_536)
                if not part:
                    raise LostError(self._last_words())
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self._stderr.seek(0)
        said = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the process that tried it ended with {how}" + (f": {first_line(said[-1])}" if said else "")


def examine(
    ask: Ask, *, measure: bool = True, tell: Tell = lambda *_: None, worker: Worker | None = None
) -> Examination:
    """Check everything, measure if asked to, and judge."""
    findings: list[Finding] = []
    measured: list[Measured] = []
    with worker or Worker() as hands:
        jobs, done = list(CHECKS), 0
        while done < len(jobs):
            tell(jobs[done], done, len(jobs))
            found, rates = _do(hands, jobs[done], ask)
            findings += found
            measured += rates
            done += 1
            if jobs[done - 1] == STREAMS and found[0].state is State.MISSING:
                hands.stop()  # a stream may still wait, and would keep everything after it
            if done == len(CHECKS) and measure:
                jobs += _measurements(num_gpus(findings))
    return Examination(findings=findings, measured=measured, verdicts=verdicts(findings))


def _measurements(gpus: int) -> list[str]:
    return [GPU + name for name in GPU_MEASUREMENTS] if gpus else [HOST + name for name in HOST_MEASUREMENTS]


def _do(worker: Worker, job: str, ask: Ask) -> tuple[list[Finding], list[Measured]]:
    try:
        found = worker.do(job, ask)
    except LostError as error:
        name = job if job in CHECKS else f"measuring {job.partition('/')[2]}"
        state = CHECKS[job].on_error if job in CHECKS else State.NOT_TESTED
        return [Finding(name=name, state=state, text=first_line(str(error)))], []
    findings = [Finding(**{**one, "state": State(one["state"])}) for one in found.get("findings", [])]
    return findings, [Measured(**one) for one in found.get("measured", [])]
