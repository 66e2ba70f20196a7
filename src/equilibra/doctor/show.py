"""How an examination is shown: a table for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from equilibra.doctor.finding import Measured
from equilibra.doctor.node import Examination
from equilibra.doctor.verdict import summary_line

__all__ = ["as_table", "as_text"]

GAP = 2
MOST_PAIRS = 6
"""so many pairs of GPUs are shown one by one"""


def as_text(examination: Examination) -> str:
    """Checks, rates, paths, and a line that sums up."""
    rows = [(one.name, str(one.state), one.text, one.advice) for one in examination.findings]
    paths = [(one.path, str(one.state), one.text, "") for one in examination.verdicts]
    wide = 1 + max(len(row[0]) for row in (*rows, *paths, *((one.name, "", "", "") for one in examination.measured)))
    parts = [_table(("check", "state", "found"), rows, wide)]
    if examination.measured:
        parts.append(_rates(examination.measured, wide))
    parts += [_table(("path", "state", "why"), paths, wide), summary_line(examination.verdicts)]
    return "\n\n".join(parts)


def as_table(examination: Examination) -> dict[str, Any]:
    """The same for programs."""
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
    if len(pairs) > MOST_PAIRS:  # the slowest and the fastest say enough; --json has all
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
