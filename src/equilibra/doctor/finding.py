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

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

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
    """the same for programs"""


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


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings, measurements and verdicts."""

    findings: list[Finding]
    """in the order of the checks"""
    measured: list[Measured]
    """empty if nothing was measured"""
    verdicts: list[Verdict]
    """one per transfer path"""


def first_line(error: BaseException | str) -> str:
    """The first line of an error, short enough for a table."""
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    if not isinstance(error, str):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…"


def _found(state: State, text: str, advice: str = "", /, *, name: str = "", **values: Any) -> Finding:  # noqa: ANN401
    """A finding; without a name, `guarded` gives it that of its check."""
    return Finding(name=name, state=state, text=text, advice=advice, values=values)


ok, warning, missing, not_tested = (partial(_found, state) for state in State)


def guarded(name: str, check: Callable[[], Finding | Sequence[Finding]], *, on_error: State) -> list[Finding]:
    """The findings of a check under its name, or one finding with its error if it raises."""
    try:
        found = check()
    except ImportError as error:
        found = missing(first_line(error))
    except Exception as error:  # noqa: BLE001 - whatever breaks in a probe is what the doctor is there to report
        found = _found(on_error, first_line(error))
    found = [found] if isinstance(found, Finding) else found
    return [replace(one, name=one.name or name) for one in found]


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def num_gpus(findings: Sequence[Finding]) -> int:
    """Number of GPUs found."""
    return sum("capability" in finding.values for finding in findings)


class _Findings(dict[str, Finding]):
    def __missing__(self, name: str) -> Finding:
        return not_tested("not looked at", name=name)

    def unusable(self, *names: str) -> tuple[PathState, str] | None:
        """The state and reason of the first missing finding, or else of the first untested one."""
        for state, ruled_out in ((State.MISSING, PathState.FAILS), (State.NOT_TESTED, PathState.NOT_TESTED)):
            for name in names:
                if self[name].state is state:
                    return ruled_out, f"{name}: {self[name].text}"
        return None


def verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    """One verdict per transfer path; a path that this runtime version lacks does not work."""
    found, gpus = _Findings({one.name: one for one in findings}), num_gpus(findings)
    listed = found[RUNTIME_PATHS].values.get("paths")
    host = ["shared memory", *(["registering"] if gpus else [])]
    ipc = ["cuda ipc", "stream values", *(["peer access"] if gpus > 1 else [])]
    made = []
    for path, needed in {"collective": [], "host": host, "ipc": ipc, "both": [*ipc, *host]}.items():
        no_gpu = (PathState.FAILS, "no GPU here") if path in ("ipc", "both") and not gpus else None
        ruled_out = found.unusable("torch", "gloo") or no_gpu or found.unusable(*needed)
        state, text = ruled_out or (PathState.WORKS, _how(path, found, gpus))
        if listed is not None and path not in listed and state is not PathState.FAILS:
            state, text = PathState.FAILS, f"this version of the runtime has no such path (the machine: {text})"
        made.append(Verdict(path=path, state=state, text=text))
    return made


def _how(path: str, found: _Findings, gpus: int) -> str:
    """How a path works on this machine."""
    if path == "collective":
        if gpus < 2:
            alone = "for processes that share the GPU; NCCL refuses two processes on one GPU"
            return f"over gloo, {alone if gpus else 'between processes without GPUs'}"
        if found["nccl"].state in (State.OK, State.WARNING):
            return f"over NCCL, one process for each of {gpus} GPUs"
        return f"over gloo only, which is slow (nccl: {found['nccl'].text})"
    if path == "host":
        little = "; it may be too small" if found["shared memory"].state is State.WARNING else ""
        return f"through /dev/shm{', registered with CUDA' if gpus else ''}{little}"
    if path == "ipc":
        alone = "between processes that share the GPU; between GPUs not tested"
        return f"between all {gpus} GPUs" if gpus > 1 else alone
    return "ipc and the host link at once"


def summary_line(made: Sequence[Verdict]) -> str:
    """All verdicts on one line."""
    words = {PathState.WORKS: "will work", PathState.FAILS: "will not work", PathState.NOT_TESTED: "not tested"}
    parts = [
        f"{', '.join(paths)} {word}"
        for state, word in words.items()
        if (paths := [one.path for one in made if one.state is state])
    ]
    return f"transfer paths: {'; '.join(parts)}"


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
