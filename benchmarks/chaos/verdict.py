"""The verdict on a run: whether its end is allowed, and whether its numbers are those of an undisturbed run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from benchmarks.chaos.cases import INJECTIONS, Case
from benchmarks.chaos.program import IN_TIME_S, Ended

TIMES = ("seconds", "tokens_per_s", "exposed")
"""metrics that are measured"""
CAUSES = {
    "kill": r"rank {rank} of {world} was killed by SIGKILL",
    "stop": r"rank {rank} of {world} did not answer and was ended",
    "pause": r"rank \d+ of {world} (did not answer|failed: (RankLostError|.* took more than the timeout))",
    "slow": r"rank \d+ of {world} (did not answer|failed: (RankLostError|.* took more than the timeout))",
    "full": r"No space left on device",
    "limit": r"File too large",
    "term": r"stopped after \d of \d steps|interrupted",
    "interrupt": r"stopped after \d of \d steps|interrupted",
    "term-all": r"stopped after \d of \d steps|interrupted",
}
assert CAUSES.keys() == INJECTIONS.keys()


@dataclass(frozen=True)
class Numbers:
    """What a run computed, for comparison."""

    metrics: tuple[str, ...]
    """one line per step and evaluation, without times"""
    files: dict[str, str]
    """hashes of weights and of the last checkpoints"""


def numbers_of(run: Path) -> Numbers:
    """The numbers of a finished run."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        rows.append(json.dumps(row, sort_keys=True))
    kept = [*sorted((run / "model").glob("*.safetensors"))]
    for folder in sorted((run / "checkpoints").glob("*/step-*")):
        kept += sorted(path for path in folder.rglob("*") if path.is_file())
    return Numbers(tuple(rows), {str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in kept})


def cause_named(case: Case, text: str) -> bool:
    """Whether the program's output names the cause."""
    return re.search(CAUSES[case.injection].format(rank=case.rank, world=case.shape.world), text) is not None


def verdict(  # noqa: PLR0911 - one for each kind of defect
    case: Case, ended: Ended, resumed: Ended | None, numbers: Numbers | None, expected: Numbers
) -> str:  # fmt: skip
    """The outcome of a run, as in the table; `defect: ...` if it is not allowed.

    resumed: how the resumed program ended; None if the first one finished. numbers: of the last program.
    """
    for name, one in (("the run", ended), ("the resumed run", resumed)):
        if one is not None and (wrong := _wrong(one)):
            return f"defect: {name} {wrong}"
    if ended.after_s is not None and resumed is not None and ended.after_s > IN_TIME_S + case.pause_s + 4.0:
        return f"defect: ended {ended.after_s:.1f} s after the injection"
    if resumed is not None:
        if resumed.code != 0:
            return f"defect: --resume ended with {resumed.code}"
        if ended.after_s is None:
            return "defect: ended before anything was injected"
        if not _at_once(ended) and not cause_named(case, ended.text):
            return "defect: the error does not name the cause"
        first = _first(resumed)
        if first < ended.saved:
            return f"defect: {ended.saved} steps were saved, --resume began after {first}"
    if numbers != expected:
        return "defect: other numbers"
    if resumed is None:
        return "finished, same numbers" if ended.after_s is not None else "finished before it happened, same numbers"
    how = "stopped as told" if ended.code == 130 or _at_once(ended) else "error"
    again = ", resumed" if _first(resumed) else " before a checkpoint, began again"
    return f"{how}{again}, same numbers"


def _wrong(ended: Ended) -> str:
    if ended.code is None:
        return "hung"
    if "Traceback" in ended.text:
        return "printed a traceback"
    if ended.code not in (0, 1, 2, 130) and not _at_once(ended):
        return f"ended with {ended.code}"
    return f"left {', '.join(ended.leftovers)}" if ended.leftovers else ""


def _at_once(ended: Ended) -> bool:
    """Whether it was told to end before it started any rank."""
    return not ended.notes and ended.code in (-SIGTERM, -SIGINT)


def _first(ended: Ended) -> int:
    """The first step of a resumed run."""
    return next((note["step"] for note in ended.notes.get(0, []) if note["kind"] == "first"), -1)


def record(case: Case, ended: Ended, resumed: Ended | None, said: str) -> dict[str, Any]:
    """The raw record of a case."""
    said_last = [line for line in ended.text.splitlines() if line.startswith(("equilibra:", "stopped after"))]
    message = re.sub(r"\S*/disk/run", "RUN", " / ".join(said_last))
    return {
        **asdict(case), "shape": case.shape.name, "groups": case.shape.groups, "injected": ended.after_s is not None,
        "code": ended.code, "seconds": round(ended.seconds, 2),
        "after_s": None if ended.after_s is None else round(ended.after_s, 2), "message": message[:600],
        "resume_seconds": None if resumed is None else round(resumed.seconds, 2), "verdict": said,
    }  # fmt: skip
