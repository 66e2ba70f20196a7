"""Figures of one planner that are shown for every layer: imbalance, and the distance from the bound.

Symbols: L layers, M micro-batches, R ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equilibra.events.imbalance import imbalance, spread
from equilibra.events.run import PlannerRecord
from equilibra.report.names import IDEAL, label_of

__all__ = ["finite", "planner_figures"]


WHOLE_STEP = ("step_time_s", "throughput_tokens_per_s")
"""what a runtime measures of a whole training step, with its rollout, and a prediction says of log-prob and update"""


def planner_figures(
    name: str, record: PlannerRecord, *, label: str | None = None, among_predictions: bool = False
) -> dict[str, Any]:
    """Everything about a planner that is small: metrics, memory, and one number per layer.

    among_predictions: the record was measured and others of the run were not; times that cannot be compared with theirs
    then have names of their own.
    """
    renamed = {key: f"measured_{key}" for key in WHOLE_STEP} if among_predictions else {}
    imbalance_LM = imbalance(record.rank_tokens_LMR)
    return {
        "name": name,
        "label": label_of(name) if label is None else label,
        "ideal": name == IDEAL,
        "num_micro_batches": int(record.rank_tokens_LMR.shape[1]),
        "metrics": {renamed.get(key, key): finite(value) for key, value in record.metrics.items()},
        "memory": {key: finite(value) for key, value in record.memory.items()},
        "imbalance_L": _rounded(imbalance_LM.mean(axis=1)),
        "worst_imbalance_L": _rounded(imbalance_LM.max(axis=1)),
        "gap": None if name == IDEAL else _gap(record),
    }


def finite(value: object) -> float | None:
    """The number, or None: JSON knows no infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _gap(record: PlannerRecord) -> dict[str, Any] | None:
    """How far slowest ranks are above the bound: of all together, and the spread over layers and micro-batches."""
    slowest = record.rank_tokens_LMR.max(axis=2).astype(np.int64)
    bound = record.bound_LM
    if not bound.sum():
        return None
    gaps = spread(slowest[bound > 0] / bound[bound > 0] - 1)
    return {
        "slowest": int(slowest.sum()),
        "bound": int(bound.sum()),
        "total": float(slowest.sum() / bound.sum() - 1),
        "p99": gaps.p99,
        "worst": gaps.worst,
    }


def _rounded(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    return [round(float(value), 6) for value in values]
