"""What the page calls planners, which two it compares, and the figures it shows for each.

Symbols: L layers, M micro-batches, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from equilibra.core.load import imbalance, spread
from equilibra.events.run import PlannerRecord, Run

__all__ = ["chosen_pair", "finite", "label_of", "labels_of", "planner_figures", "predictions_in"]

BASELINE, HERO, IDEAL, PREDICTED = "static", "equilibra", "balanced", "predicted"
LABELS = {
    "static": "static placement",
    "lpt": "LPT",
    "eplb-history": "EPLB (history)",
    "eplb-oracle": "EPLB (oracle)",
    "lplb": "LPLB",
    "ultraep": "UltraEP's rule",
    "llep": "LLEP's rule",
    "equilibra": "Equilibra",
    "balanced": "perfectly balanced (ideal)",
    "predicted": "the same plan, predicted",
}


def label_of(name: str) -> str:
    """The planner's name on the page; unknown planners keep their own."""
    return LABELS.get(name, name)


def predictions_in(run: Run) -> list[str]:
    """The predicted records of a measured run; empty for a simulated run, where nothing was measured."""
    said = run.about.get("predicted")
    named = [PREDICTED, *(said if isinstance(said, list) else [])]
    found = [name for name in run.planners if name in named]
    return found if run.about.get("kind") == "measured" and len(found) < len(run.planners) else []


def labels_of(run: Run) -> dict[str, str]:
    """Names on the page, marked measured or predicted if the run has both."""
    predicted = predictions_in(run)
    if not predicted:
        return {name: label_of(name) for name in run.planners}
    measured = [label_of(name) for name in run.planners if name not in predicted]
    labels = {name: f"{label_of(name)}, {'predicted' if name in predicted else 'measured'}" for name in run.planners}
    if PREDICTED in labels:
        labels[PREDICTED] = f"{measured[0]}, predicted" if len(measured) == 1 else label_of(PREDICTED)
    return labels


def chosen_pair(names: Iterable[str]) -> tuple[str | None, str | None]:
    """(before, after): static placement and Equilibra, or the closest substitutes; None where there is none.

    The ideal is not a plan and never chosen. The prediction of a measured plan is compared with it only if there is
    nothing else.
    """
    given = list(names)
    plans = [name for name in given if name not in (IDEAL, PREDICTED)] or [name for name in given if name != IDEAL]
    after = HERO if HERO in plans else next((name for name in reversed(plans) if name != BASELINE), None)
    before = BASELINE if BASELINE in plans else next((name for name in plans if name != after), None)
    if after is None:
        before, after = None, before
    if before is None and after is not None and PREDICTED in given and after != PREDICTED:
        before = PREDICTED
    return before, after


WHOLE_STEP = ("step_time_s", "throughput_tokens_per_s")
"""metrics that cover the whole training step when measured, but only log-prob and update when predicted"""


def planner_figures(
    name: str, record: PlannerRecord, *, label: str | None = None, among_predictions: bool = False
) -> dict[str, Any]:
    """Metrics and memory of a planner, and its imbalance per layer.

    With among_predictions the record is measured and others of the run are not: times that do not compare with theirs
    get names of their own.
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
    """The number, or None if it is not finite, which JSON cannot express."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _gap(record: PlannerRecord) -> dict[str, Any] | None:
    """Slowest ranks relative to the lower bound: in total, and the spread over layers and micro-batches."""
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
