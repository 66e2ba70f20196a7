"""metrics.jsonl: one line per step and per evaluation, on the disk as soon as it is known.

    {"kind": "step", "step": 3, "reward": 0.41, ...}
    {"kind": "evaluation", "step": 20, "reward_held_out": 0.44}

Values that are no number (a mean of nothing) are null. A line that a crash tore is not read. A resumed run cuts off
what it will do again, so the file never holds a step twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any

from equilibra.core.atomic import atomic_file, cannot
from equilibra.train.history import History

__all__ = ["MetricsFile", "read_history"]

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
