"""Examine a node: run checks and measurements one by one in a worker process, and show what they found.

A job over its time limit is killed with all its children, and a worker that dies loses only its job: the next job
starts a new worker. This module does not import torch.
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
from dataclasses import asdict, dataclass
from threading import Timer
from time import monotonic
from typing import Any, Self

from equilibra.doctor.devices import STREAM_VALUES
from equilibra.doctor.finding import (
    Ask,
    Finding,
    Measured,
    State,
    Verdict,
    first_line,
    num_gpus,
    summary_line,
    verdicts,
)
from equilibra.doctor.measure import GPU_MEASUREMENTS, HOST_MEASUREMENTS
from equilibra.doctor.worker import CHECKS, GPU, HOST

__all__ = ["Examination", "as_table", "as_text", "examine"]

Tell = Callable[[str, int, int], None]
"""called with the next job, the number of jobs done and of all jobs"""

LIMIT_S = 60.0
"""limit of one job; checks that wait for something give up sooner"""
START_S = 60.0
"""extra time for the first job of a worker, which imports torch"""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings, measurements and verdicts."""

    findings: list[Finding]
    """in the order of the checks"""
    measured: list[Measured]
    """empty if nothing was measured"""
    verdicts: list[Verdict]
    """one per transfer path"""


class LostError(Exception):
    """The worker did not answer."""


class Worker:
    """A process that runs jobs; started on first use and after it was lost."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "equilibra.doctor.worker"]
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        self._stderr.seek(0)
        self._stderr.truncate()
        return subprocess.Popen(  # noqa: S603 - this package
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )

    def _line(self, limit_s: float) -> bytes:
        """The next line the worker writes; over the limit, it is killed."""
        assert self._process is not None
        assert self._process.stdout is not None
        begin, timer = monotonic(), Timer(limit_s, _kill, [self._process])
        timer.daemon = True
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return line
        late = monotonic() - begin >= limit_s
        raise LostError(f"did not finish within {limit_s:.0f} s" if late else self._last_words())

    def _last_words(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self._stderr.seek(0)
        said = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the worker process ended with {how}" + (f": {first_line(said[-1])}" if said else "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def examine(
    ask: Ask, *, measure: bool = True, tell: Tell = lambda *_: None, worker: Worker | None = None
) -> Examination:
    """Run all checks, measure if asked to, and judge the transfer paths."""
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
            if jobs[done - 1] == STREAM_VALUES and found[0].state is State.MISSING:
                hands.stop()  # a stream may still wait and would block every later job
            if done == len(CHECKS) and measure:
                on_gpu = num_gpus(findings) > 0
                jobs += (
                    [GPU + name for name in GPU_MEASUREMENTS] if on_gpu else [HOST + name for name in HOST_MEASUREMENTS]
                )
    return Examination(findings=findings, measured=measured, verdicts=verdicts(findings))


def _do(worker: Worker, job: str, ask: Ask) -> tuple[list[Finding], list[Measured]]:
    try:
        found = worker.do(job, ask)
    except LostError as error:
        name = job if job in CHECKS else f"measuring {job.partition('/')[2]}"
        state = CHECKS[job].on_error if job in CHECKS else State.NOT_TESTED
        return [Finding(name=name, state=state, text=first_line(str(error)))], []
    findings = [Finding(**{**one, "state": State(one["state"])}) for one in found.get("findings", [])]
    return findings, [Measured(**one) for one in found.get("measured", [])]


GAP = 2
MOST_PAIRS = 6
"""with more pairs of GPUs, only the slowest and the fastest are shown"""


def as_text(examination: Examination) -> str:
    """Tables of checks, rates and paths, and a summary line."""
    rows = [(one.name, str(one.state), one.text, one.advice) for one in examination.findings]
    paths = [(one.path, str(one.state), one.text, "") for one in examination.verdicts]
    wide = 1 + max(len(row[0]) for row in (*rows, *paths, *((one.name, "", "", "") for one in examination.measured)))
    parts = [_table(("check", "state", "found"), rows, wide)]
    if examination.measured:
        parts.append(_rates(examination.measured, wide))
    parts += [_table(("path", "state", "why"), paths, wide), summary_line(examination.verdicts)]
    return "\n\n".join(parts)


def as_table(examination: Examination) -> dict[str, Any]:
    """The examination as a JSON object."""
    return {
        "findings": [asdict(one) for one in examination.findings],
        "measured": [asdict(one) for one in examination.measured],
        "paths": [asdict(one) for one in examination.verdicts],
        "verdict": summary_line(examination.verdicts),
    }


def _table(heads: tuple[str, str, str], rows: Sequence[tuple[str, str, str, str]], wide: int) -> str:
    states = GAP + max(len(row[1]) for row in rows)
    lines = [f"{heads[0]:{wide + GAP}}{heads[1]:{states}}{heads[2]}"]
    for name, state, text, advice in rows:
        lines.append(f"{name:{wide + GAP}}{state:{states}}{text}")
        if advice:
            lines.append(f"{'':{wide + GAP}}{'':{states}}→ {advice}")
    return "\n".join(lines)


def _rates(measured: Sequence[Measured], wide: int) -> str:
    lines = [f"{'measured':{wide + GAP}}{'median':>10} {'':8}{'quartiles':>18}{'repeats':>9}"]
    pairs = [one for one in measured if one.cases[-1]["kind"] == "nvlink"]
    shown = list(measured)
    if len(pairs) > MOST_PAIRS:
        ends = sorted(pairs, key=lambda one: one.value)
        shown = [one for one in measured if one not in pairs] + [ends[0], ends[-1]]
    for one in shown:
        spread = f"{_figure(one.low)} to {_figure(one.high)}"
        lines.append(f"{one.name:{wide + GAP}}{_figure(one.value):>10} {one.unit:8}{spread:>18}{one.repeats:>9}")
    if len(shown) < len(measured):
        lines.append(f"(the slowest and the fastest of {len(pairs)} pairs of GPUs; --json has all)")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
