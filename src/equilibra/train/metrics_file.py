"""metrics.jsonl: one line per step and per evaluation, on the disk as soon as it is known.

    {"kind": "step", "step": 3, "reward": 0.41, ...}
    {"kind": "evaluation", "step": 20, "reward_held_out": 0.44}

Values that are no number (a mean of nothing) are null. A line that a crash tore is not read. A resumed run cuts off
what it will do again, so the file never holds a step twice.
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

__all__ = ["MAX_POINTS", "History", "MetricsFile", "curves", "read_history"]

# Curves: what a run reported, as columns of bounded size for its report.
#
#     {"num_steps": 100, "every": 1, "steps": {"step": [0, 1, ...], "reward": [0.29, ...], "seconds_update": [...],
#     ...},
#      "held_out": {"step": [0, 20, ...], "reward": [0.29, ...]}}
#
# What is no number is null. Of a long run every n-th step is kept, and the last one.


MAX_POINTS = 2000
"""steps that are kept at most, and evaluations"""
MAX_STAGES = 16
METRICS = (
    "reward", "kl", "entropy", "loss", "imbalance_static", "imbalance", "exposed", "mismatch_max", "tokens_per_s",
    "seconds",
)  # fmt: skip
STAGE = "seconds_"

Column = list[float | None]


def curves(history: History) -> dict[str, Any] | None:
    """The columns; None if no step is over."""
    if not history.steps:
        return None
    every = -(-len(history.steps) // MAX_POINTS)
    chosen = _thinned(sorted(history.steps), every)
    stages = list(dict.fromkeys(name for step in chosen for name in history.steps[step] if name.startswith(STAGE)))
    columns = {name: _column(history.steps, chosen, name) for name in (*METRICS, *stages[:MAX_STAGES])}
    asked = sorted(history.evaluations)
    asked = _thinned(asked, -(-len(asked) // MAX_POINTS))
    return {
        "num_steps": len(history.steps),
        "every": every,
        "steps": {"step": chosen, **{name: column for name, column in columns.items() if _says_something(column)}},
        "held_out": {"step": asked, "reward": _column(history.evaluations, asked, "reward_held_out")},
    }


def _thinned(steps: Sequence[int], every: int) -> list[int]:
    """Every n-th, counted from the last one back."""
    return list(steps[:: -max(every, 1)][::-1])


def _column(rows: Mapping[int, Mapping[str, float]], steps: Sequence[int], name: str) -> Column:
    return [_rounded(rows[step].get(name, math.nan)) for step in steps]


def _rounded(value: float) -> float | None:
    """Six digits: more cannot be seen, and a page is sent around."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _says_something(column: Column) -> bool:
    return any(value is not None for value in column)


# What a run has reported so far: metrics of its steps and of its evaluations, in order.
#
# Steps count from 0. An evaluation of step s comes before step s: the model has been trained for s steps.


Row = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class History:
    """Rows by step."""

    steps: dict[int, Row] = field(default_factory=dict)
    """metrics of every step that is over"""
    evaluations: dict[int, Row] = field(default_factory=dict)
    """metrics of every evaluation"""

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over; what is known of it and of later ones is from before a restart, and goes."""
        self.forget(step, self.steps)
        self.forget(step + 1, self.evaluations)
        self.steps[step] = dict(metrics)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out problems were answered before this step."""
        self.forget(step, self.evaluations)
        self.evaluations[step] = dict(metrics)

    @staticmethod
    def forget(step: int, rows: dict[int, Row]) -> None:
        """Drop rows of this step and later ones."""
        for later in [one for one in rows if one >= step]:
            del rows[later]

    def series(self, name: str) -> list[float]:
        """Finite values of a metric of steps, in order."""
        return _finite(self.steps, name)

    def held_out(self) -> list[float]:
        """Finite mean rewards on held-out problems, in order."""
        return _finite(self.evaluations, "reward_held_out")

    def last(self, name: str) -> float | None:
        """The metric of the newest step, if it has one."""
        return self.steps[max(self.steps)].get(name) if self.steps else None


def _finite(rows: dict[int, Row], name: str) -> list[float]:
    return [row[name] for _, row in sorted(rows.items()) if name in row and math.isfinite(row[name])]


STEP, EVALUATION = "step", "evaluation"


class MetricsFile:
    """An observer that appends to the file. It is opened for every line: it may be cut in between."""

    def __init__(self, path: Path) -> None:
        """Nothing is written yet."""
        self.path = path

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of a step."""
        self._append(STEP, step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of an evaluation."""
        self._append(EVALUATION, step, metrics)

    def cut(self, step: int) -> None:
        """Drop the lines of this step and later ones, and torn lines: `step` is the next one that runs."""
        if not self.path.exists():
            return
        kept = [row for row in _rows(self.path) if row["step"] < step]
        with atomic_file(self.path, overwrite=True) as part:
            part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")

    def _append(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step}
        row |= {name: _number(value) for name, value in metrics.items() if name not in row}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # behind a torn line
                file.write(line)
        except OSError as error:
            raise cannot("write", self.path, error) from error


def _number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def read_history(path: Path) -> History:
    """What the file holds; nothing if there is none."""
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
    """Whole lines, in order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise cannot("read", path, error) from error
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn by a crash, or by another hand
            continue
        if isinstance(row, dict) and row.get("kind") in {STEP, EVALUATION} and type(row.get("step")) is int:
            yield row
