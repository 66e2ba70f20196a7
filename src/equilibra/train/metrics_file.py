"""metrics.jsonl, one line per step and evaluation, and the history and curves made from it.

    {"kind": "step", "step": 3, "reward": 0.41, ...}
    {"kind": "evaluation", "step": 20, "reward_held_out": 0.44}

Steps count from 0; the evaluation of step s comes before step s. Values that are not finite are null. Readers skip
lines torn by a crash. A resumed run first cuts the steps that it will repeat, so no step is there twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any

from equilibra.core.atomic import atomic_file, cannot
from equilibra.rl.observe import Observer

__all__ = ["MAX_POINTS", "History", "MetricsFile", "curves", "read_history"]

STEP, EVALUATION = "step", "evaluation"
MAX_POINTS = 2000
"""most steps, and most evaluations, of the curves"""
MAX_STAGES = 16
METRICS = (
    "reward", "kl", "entropy", "loss", "imbalance_static", "imbalance", "exposed", "mismatch_max", "tokens_per_s",
    "seconds",
)  # fmt: skip
STAGE = "seconds_"

Row = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class History:
    """Metrics that a run has reported so far, by step."""

    steps: dict[int, Row] = field(default_factory=dict)
    evaluations: dict[int, Row] = field(default_factory=dict)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a finished step; drops this and later steps, which are from before a restart."""
        _forget(step, self.steps)
        _forget(step + 1, self.evaluations)
        self.steps[step] = dict(metrics)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation before this step; drops later ones."""
        _forget(step, self.evaluations)
        self.evaluations[step] = dict(metrics)

    def series(self, name: str) -> list[float]:
        """Finite values of a metric over the steps."""
        return _finite(self.steps, name)

    def held_out(self) -> list[float]:
        """Finite mean rewards on held-out problems over the evaluations."""
        return _finite(self.evaluations, "reward_held_out")

    def last(self, name: str) -> float | None:
        """The metric of the newest step; None if it has none."""
        return self.steps[max(self.steps)].get(name) if self.steps else None


def _forget(step: int, rows: dict[int, Row]) -> None:
    for later in [one for one in rows if one >= step]:
        del rows[later]


def _finite(rows: dict[int, Row], name: str) -> list[float]:
    return [row[name] for _, row in sorted(rows.items()) if name in row and math.isfinite(row[name])]


class MetricsFile(Observer):
    """An observer that appends to the file and opens it for every line, because it may be cut in between."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(STEP, step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(EVALUATION, step, metrics)

    def cut(self, step: int) -> None:
        """Drop torn lines and the lines from `step` on, the next step to run."""
        if not self.path.exists():
            return
        kept = [row for row in _rows(self.path) if row["step"] < step]
        with atomic_file(self.path, overwrite=True) as part:
            part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")

    def _append(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step}
        plain = {name: float(value) for name, value in metrics.items() if name not in row}
        row |= {name: value if math.isfinite(value) else None for name, value in plain.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # after a torn line
                file.write(line)
        except OSError as error:
            raise cannot("write", self.path, error) from error


def read_history(path: Path) -> History:
    """The history in the file; empty if there is no file."""
    history = History()
    for row in _rows(path) if path.exists() else ():
        metrics = {
            name: math.nan if value is None else float(value)
            for name, value in row.items() if value is None or isinstance(value, int | float)
        }  # fmt: skip
        del metrics["step"]
        (history.add_step if row["kind"] == STEP else history.add_evaluation)(row["step"], metrics)
    return history


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise cannot("read", path, error) from error
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn by a crash, or edited
            continue
        if isinstance(row, dict) and row.get("kind") in {STEP, EVALUATION} and type(row.get("step")) is int:
            yield row


def curves(history: History) -> dict[str, Any] | None:
    """The history as columns of bounded size, for the report; None before the first step is finished.

        {"num_steps": 100, "every": 1, "steps": {"step": [0, 1, ...], "reward": [0.29, ...], ...},
         "held_out": {"step": [0, 20, ...], "reward": [0.29, ...]}}

    Of a long run every n-th step is kept, counted back from the last.
    """
    if not history.steps:
        return None
    every = -(-len(history.steps) // MAX_POINTS)
    chosen = _thinned(sorted(history.steps), every)
    stages = list(dict.fromkeys(name for step in chosen for name in history.steps[step] if name.startswith(STAGE)))
    columns = {name: _column(history.steps, chosen, name) for name in (*METRICS, *stages[:MAX_STAGES])}
    known = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    asked = sorted(history.evaluations)
    asked = _thinned(asked, -(-len(asked) // MAX_POINTS))
    return {
        "num_steps": len(history.steps),
        "every": every,
        "steps": {"step": chosen, **known},
        "held_out": {"step": asked, "reward": _column(history.evaluations, asked, "reward_held_out")},
    }


def _thinned(steps: Sequence[int], every: int) -> list[int]:
    return list(steps[:: -max(every, 1)][::-1])


def _column(rows: Mapping[int, Mapping[str, float]], steps: Sequence[int], name: str) -> list[float | None]:
    """Values to six digits, which is all that a curve shows; None where not finite."""
    values = (rows[step].get(name, math.nan) for step in steps)
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
