"""Examine a node: run checks and measurements one by one in a worker process.

Drivers hang and libraries crash, so everything that touches a device runs in the worker, which is this file run as a
program: it reads one job per line and answers with one line of JSON. A job over its time limit is killed with all its
children, and a worker that dies loses only its job: the next job starts a new worker. Importing this module does not
import torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Timer
from time import monotonic
from typing import Any, NamedTuple, Self

from equilibra.doctor import devices, finding, memory, software
from equilibra.doctor.finding import Ask, Examination, Finding, Measured, State
from equilibra.doctor.measure import MEASUREMENTS

Tell = Callable[[str, int, int], None]
"""called with the next job, the number of jobs done and of all jobs"""

LIMIT_S = 60.0
"""time limit of one job; checks that wait for something give up sooner"""
START_S = 60.0
"""extra time for the first job of a worker, which imports torch"""


class LostError(Exception):
    """The worker did not answer."""


class Worker:
    """A process that runs jobs; started on first use and after it was lost."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "equilibra.doctor.node"]
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._stderr.close()

    def do(self, job: str, ask: Ask, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The answer to a job; LostError if there is none within the limit."""
        question = json.dumps({"job": job, "ask": asdict(ask)})
        try:
            if self._process is None:
                self._process = self._started()
                limit_s += START_S
            found: dict[str, Any] = json.loads(self._answer(self._process, question, limit_s))
        except (LostError, OSError, ValueError) as error:
            self.stop()
            raise LostError(str(error) or type(error).__name__) from error
        return found

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError), process:  # Popen closes its pipes and waits
                _kill(process)

    def _started(self) -> subprocess.Popen[bytes]:
        self._stderr.seek(0)
        self._stderr.truncate()
        return subprocess.Popen(  # noqa: S603 - this package
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )

    def _answer(self, process: subprocess.Popen[bytes], question: str, limit_s: float) -> bytes:
        """The line the worker answers with; over the limit, the worker is killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        begin, timer = monotonic(), Timer(limit_s, _kill, [process])
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return line
        late = monotonic() - begin >= limit_s
        raise LostError(f"did not finish within {limit_s:.0f} s" if late else self._last_words(process))

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self._stderr.seek(0)
        said = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the worker process ended with {how}" + (f": {finding.first_line(said[-1])}" if said else "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def examine(
    ask: Ask, *, measure: bool = True, tell: Tell = lambda *_: None, worker: Worker | None = None
) -> Examination:
    """Run all checks, measure if asked to, and judge the transfer paths."""
    findings: list[Finding] = []
    measured: list[Measured] = []
    jobs = list(CHECKS)
    with worker or Worker() as hands:
        for done, job in enumerate(jobs):
            tell(job, done, len(jobs))
            found, rates = _do(hands, job, ask)
            findings += found
            measured += rates
            if job == devices.STREAM_VALUES and found[0].state is State.MISSING:
                hands.stop()  # a stream may still wait and would block every later job
            if measure and done == len(CHECKS) - 1:  # the loop goes on with the measurements
                kind = "gpu/" if finding.num_gpus(findings) else "host/"
                jobs += [name for name in MEASUREMENTS if name.startswith(kind)]
    return Examination(findings=findings, measured=measured, verdicts=finding.verdicts(findings))


def _do(worker: Worker, job: str, ask: Ask) -> tuple[list[Finding], list[Measured]]:
    try:
        found = worker.do(job, ask)
    except LostError as error:
        name, state = _name_and_state(job)
        return [Finding(name=name, state=state, text=finding.first_line(str(error)))], []
    findings = [Finding(**{**one, "state": State(one["state"])}) for one in found.get("findings", [])]
    return findings, [Measured(**one) for one in found.get("measured", [])]


def _name_and_state(job: str) -> tuple[str, State]:
    """Name and state of the finding if a job fails."""
    return (job, CHECKS[job].on_error) if job in CHECKS else (f"measuring {job.partition('/')[2]}", State.NOT_TESTED)


# The worker process. Answers go to the original stdout; what libraries print goes to stderr.

TRIED = State.MISSING
"""state after an error in a check that runs something: it does not work"""
READ = State.NOT_TESTED
"""state after an error in a check that only looks something up: unknown"""


def check_paths() -> Finding:
    """The transfer paths of this version of the runtime."""
    from equilibra.execute.copies.transfer import Path

    paths = [str(path) for path in Path]
    return finding.ok(f"{', '.join(paths)} in this version", paths=paths)


class Check(NamedTuple):
    """A check, and the state of its finding if it raises."""

    on_error: State
    run: Callable[..., Finding | Sequence[Finding]]
    asks: bool = False
    """whether it takes the user's `Ask`"""
    on_gpu: bool = False
    """whether it is run only where there is a GPU"""


CHECKS = {
    "python": Check(READ, software.check_python),
    "torch": Check(TRIED, software.check_torch),
    "cuda": Check(READ, software.check_cuda),
    "triton": Check(READ, software.check_triton),
    "gpu": Check(READ, devices.check_gpus),
    "sharing a gpu": Check(READ, devices.check_sharing, on_gpu=True),
    "peer access": Check(READ, devices.check_peers, on_gpu=True),
    "nvlink": Check(READ, devices.check_nvlink, on_gpu=True),
    "nccl": Check(TRIED, software.check_nccl),
    "gloo": Check(TRIED, software.check_gloo),
    "locked memory": Check(READ, memory.check_locked),
    "pinned memory": Check(TRIED, memory.check_pinning, on_gpu=True),
    "shared memory": Check(TRIED, memory.check_shared_memory, asks=True),
    "registering": Check(TRIED, memory.check_registering, on_gpu=True),
    "cuda ipc": Check(TRIED, devices.check_ipc, on_gpu=True),
    "stream values": Check(TRIED, devices.check_stream_values, on_gpu=True),
    finding.RUNTIME_PATHS: Check(READ, check_paths),
}
"""by name, in display order"""


def answer(job: str, ask: Ask) -> dict[str, Any]:
    """Run one job; returns its findings and measurements, ready for JSON."""
    measured: list[Measured] = []

    def run() -> Finding | Sequence[Finding]:
        if job in MEASUREMENTS:
            rates = MEASUREMENTS[job]()
            measured.extend([rates] if isinstance(rates, Measured) else rates)
            return []
        check = CHECKS[job]
        if check.on_gpu and not finding.has_gpu():
            return finding.not_tested("no GPU here")
        return check.run(ask) if check.asks else check.run()

    name, on_error = _name_and_state(job)
    findings = finding.guarded(name, run, on_error=on_error)
    return {"findings": [asdict(one) for one in findings], "measured": [asdict(one) for one in measured]}


def main() -> None:
    """Answer jobs until stdin closes."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(answer(question["job"], Ask(**question["ask"]))), file=out, flush=True)
    os._exit(0)  # a stream that still waits must not keep the process alive


if __name__ == "__main__":
    main()
