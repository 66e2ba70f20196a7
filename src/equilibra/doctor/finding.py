"""What the doctor reports: findings, measured rates, and a verdict on each transfer path of the runtime.

Verdicts follow from the findings alone.

| path | needs |
|---|---|
| collective | gloo; NCCL carries the rows where each process has its own GPU |
| host | gloo, /dev/shm, and on GPUs the right to register shared memory with CUDA |
| ipc | gloo, CUDA IPC, stream values, and peer access between all GPUs |
| both | what ipc and host need |

Every path needs gloo: counts, votes and plan hashes always go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "RUNTIME_PATHS",
    "Ask",
    "Finding",
    "Measured",
    "PathState",
    "State",
    "Verdict",
    "first_line",
    "guarded",
    "num_gpus",
    "summary_line",
    "verdicts",
    "without_gpu",
]

RUNTIME_PATHS = "transfer paths"
"""name of the finding that lists the paths this version of the runtime has"""
MOST_LETTERS = 200


class State(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    """works"""
    WARNING = "warning"
    """works, but not as well as it could"""
    MISSING = "missing"
    """absent, or tried and failed"""
    NOT_TESTED = "not-tested"
    """unknown: this machine has nothing to test it on"""


class PathState(StrEnum):
    """Whether a transfer path works on this machine."""

    WORKS = "will-work"
    FAILS = "will-not-work"
    NOT_TESTED = "not-tested"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the user wants to run on the machine."""

    model: str | None = None
    """preset or file, to size shared memory for"""
    spare_slots: int = 2
    """flash copies per rank"""
    ranks_per_node: int | None = None
    """ranks on this machine; None: one per GPU"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    state: State
    text: str
    """what was found"""
    advice: str = ""
    """what to do about it; empty: nothing"""
    values: dict[str, Any] = field(default_factory=dict)
    """what was found, for programs"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured rate."""

    name: str
    value: float
    """median of the largest case"""
    unit: str
    """GB/s or TFLOP/s"""
    low: float
    """lower quartile of the largest case"""
    high: float
    """upper quartile of the largest case"""
    repeats: int
    """number of timings of the largest case"""
    cases: list[dict[str, Any]]
    """all cases, in the form `cost.calibrate` takes"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether one transfer path of the runtime works, and why."""

    path: str
    """its name in the configuration"""
    state: PathState
    text: str


def first_line(error: BaseException | str) -> str:
    """The first line of an error, short enough for a table."""
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    if not isinstance(error, str):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…"


def guarded(name: str, check: Callable[[], Finding | Sequence[Finding]], *, on_error: State) -> list[Finding]:
    """The findings of a check, or one finding with its error if it raises."""
    try:
        found = check()
    except ImportError as error:
        return [Finding(name=name, state=State.MISSING, text=first_line(error))]
    except Exception as error:  # noqa: BLE001 - whatever breaks in a probe is what the doctor is there to report
        return [Finding(name=name, state=on_error, text=first_line(error))]
    return [found] if isinstance(found, Finding) else list(found)


def without_gpu(name: str) -> Finding | None:
    """A not-tested finding if the machine has no GPU, else None."""
    import torch

    if torch.cuda.is_available():
        return None
    return Finding(name=name, state=State.NOT_TESTED, text="no GPU here")


class _Findings:
    """Findings by name."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._of_name = {finding.name: finding for finding in findings}

    def state(self, name: str) -> State:
        found = self._of_name.get(name)
        return found.state if found else State.NOT_TESTED

    def reason(self, name: str) -> str:
        found = self._of_name.get(name)
        return f"{name}: {found.text}" if found else f"{name}: not looked at"

    def first_unusable(self, names: Sequence[str]) -> Verdict | None:
        """Verdict of the first missing, else first untested, finding; the caller fills in the path."""
        for state, path_state in ((State.MISSING, PathState.FAILS), (State.NOT_TESTED, PathState.NOT_TESTED)):
            for name in names:
                if self.state(name) is state:
                    return Verdict(path="", state=path_state, text=self.reason(name))
        return None


def num_gpus(findings: Sequence[Finding]) -> int:
    """Number of GPUs found."""
    return sum("capability" in finding.values for finding in findings)


def verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    """One verdict per transfer path."""
    found, gpus = _Findings(findings), num_gpus(findings)
    listed = next((finding.values.get("paths") for finding in findings if finding.name == RUNTIME_PATHS), None)
    judges: dict[str, Callable[[_Findings, int], Verdict]] = {
        "collective": _collective, "host": _host, "ipc": _ipc, "both": _both,
    }  # fmt: skip
    made = []
    for path, judge in judges.items():
        one = found.first_unusable(["torch", "gloo"]) or judge(found, gpus)
        made.append(_in_runtime(Verdict(path=path, state=one.state, text=one.text), listed))
    return made


def summary_line(made: Sequence[Verdict]) -> str:
    """All verdicts on one line."""
    words = {PathState.WORKS: "will work", PathState.FAILS: "will not work", PathState.NOT_TESTED: "not tested"}
    parts = []
    for state, word in words.items():
        if paths := [one.path for one in made if one.state is state]:
            parts.append(f"{', '.join(paths)} {word}")
    return f"transfer paths: {'; '.join(parts)}"


def _collective(found: _Findings, gpus: int) -> Verdict:
    if gpus == 0:
        return Verdict(path="", state=PathState.WORKS, text="over gloo, between processes without GPUs")
    if gpus == 1:
        return Verdict(path="", state=PathState.WORKS, text="over gloo, for processes that share the GPU; NCCL refuses "
                       "two processes on one GPU")  # fmt: skip
    if found.state("nccl") in (State.OK, State.WARNING):
        return Verdict(path="", state=PathState.WORKS, text=f"over NCCL, one process for each of {gpus} GPUs")
    return Verdict(path="", state=PathState.WORKS, text=f"over gloo only, which is slow ({found.reason('nccl')})")


def _host(found: _Findings, gpus: int) -> Verdict:
    needs = ["shared memory", "registering"] if gpus else ["shared memory"]
    if ruled_out := found.first_unusable(needs):
        return ruled_out
    little = found.state("shared memory") is State.WARNING
    text = "through /dev/shm" + (", registered with CUDA" if gpus else "")
    return Verdict(path="", state=PathState.WORKS, text=text + ("; it may be too small" if little else ""))


def _ipc(found: _Findings, gpus: int) -> Verdict:
    if gpus == 0:
        return Verdict(path="", state=PathState.FAILS, text="no GPU here")
    needs = ["cuda ipc", "stream values", *(["peer access"] if gpus > 1 else [])]
    if ruled_out := found.first_unusable(needs):
        return ruled_out
    text = f"between all {gpus} GPUs" if gpus > 1 else "between processes that share the GPU; between GPUs not tested"
    return Verdict(path="", state=PathState.WORKS, text=text)


def _both(found: _Findings, gpus: int) -> Verdict:
    needed = [_ipc(found, gpus), _host(found, gpus)]
    for state in (PathState.FAILS, PathState.NOT_TESTED):
        for one in needed:
            if one.state is state:
                return one
    return Verdict(path="", state=PathState.WORKS, text="ipc and the host link at once")


def _in_runtime(verdict: Verdict, listed: Collection[str] | None) -> Verdict:
    """The verdict, turned to FAILS if this version of the runtime lacks the path."""
    if listed is None or verdict.path in listed or verdict.state is PathState.FAILS:
        return verdict
    text = f"this version of the runtime has no such path (the machine: {verdict.text})"
    return Verdict(path=verdict.path, state=PathState.FAILS, text=text)
