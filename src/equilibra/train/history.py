"""What a run has reported so far: metrics of its steps and of its evaluations, in order.

Steps count from 0. An evaluation of step s comes before step s: the model has been trained for s steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["History"]

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
