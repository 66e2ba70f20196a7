"""Curves: what a run reported, as columns of bounded size for its report.

    {"num_steps": 100, "every": 1, "steps": {"step": [0, 1, ...], "reward": [0.29, ...], "seconds_update": [...], ...},
     "held_out": {"step": [0, 20, ...], "reward": [0.29, ...]}}

What is no number is null. Of a long run every n-th step is kept, and the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from equilibra.train.history import History

__all__ = ["MAX_POINTS", "curves"]

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
    return [_number(rows[step].get(name, math.nan)) for step in steps]


def _number(value: float) -> float | None:
    """Six digits: more cannot be seen, and a page is sent around."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _says_something(column: Column) -> bool:
    return any(value is not None for value in column)
