"""What the page shows of each planner: its name, figures, and for the drill-down what every rank, expert and copy does.

Symbols: L layers, M micro-batches, R ranks, E experts, C standing copies.

Rank loads that follow from homes and copies (always, for a plan) are not stored: the page computes them. Planners with
the same micro-batches share the expert tokens, which are most of the bytes. `pack` writes an array in its smallest
type, one byte plane after the other, gzipped, in base64. High bytes of counts hardly change, so as a plane of their own
they compress to almost nothing. `assets/data.js` unpacks it. The same array always gives the same text.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import imbalance, spread
from equilibra.events.run import PlannerRecord, Run

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

    The ideal is not a plan and never chosen. A measured plan is compared with its own prediction only if the run has
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

    among_predictions: this record is measured, others of the run are predicted; metrics that do not compare with theirs
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
        "imbalance_L": imbalance_LM.mean(axis=1).round(6).tolist(),
        "worst_imbalance_L": imbalance_LM.max(axis=1).round(6).tolist(),
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


INTEGERS = ("u1", "u2", "u4", "i1", "i2", "i4")
FLASH = ("flash_expert", "flash_rank", "flash_origin", "flash_tokens")
STANDING = ("standing_layer", "standing_expert", "standing_rank", "standing_tokens_CM")

Detail = dict[str, dict[str, Any]]
"""packed arrays by key"""


def collect_detail(run: Run, *, budget_bytes: int) -> tuple[Detail, dict[str, dict[str, str]]]:
    """(packed arrays by key, keys of the arrays of every planner with a drill-down).

    The two planners that the page compares always get one; others while `budget_bytes` lasts.
    """
    arrays: Detail = {}
    keys_of_planner: dict[str, dict[str, str]] = {}
    pair = [name for name in chosen_pair(run.planners) if name is not None]
    others = [name for name in run.planners if name not in pair and name != IDEAL]
    for name in (*pair, *others):
        new, keys = _packed_record(run.planners[name], known=arrays)
        if name in pair or packed_size(arrays) + packed_size(new) <= budget_bytes:
            arrays |= new
            keys_of_planner[name] = keys
    return arrays, {name: keys_of_planner[name] for name in run.planners if name in keys_of_planner}


def rank_tokens_of(record: PlannerRecord) -> NDArray[np.int64]:
    """[L, M, R] rank loads that follow from homes and copies, as the page computes them."""
    layers, micro_batches, ranks = record.rank_tokens_LMR.shape
    loads = np.zeros((layers, micro_batches, ranks), np.int64)
    layer_L, batch_M = np.arange(layers)[:, None, None], np.arange(micro_batches)[None, :, None]
    home = record.home_of_expert_LE
    np.add.at(loads, (layer_L, batch_M, home[:, None, :]), record.expert_tokens_LME)
    problem = np.repeat(np.arange(layers * micro_batches), np.diff(record.flash_first_of_problem))
    layer, batch = problem // micro_batches, problem % micro_batches
    np.add.at(loads, (layer, batch, record.flash_rank), record.flash_tokens)
    np.subtract.at(loads, (layer, batch, home[layer, record.flash_expert]), record.flash_tokens)
    layer_C, served = record.standing_layer[:, None], record.standing_tokens_CM
    np.add.at(loads, (layer_C, batch_M[:, :, 0], record.standing_rank[:, None]), served)
    home_C = home[record.standing_layer, record.standing_expert][:, None]
    np.subtract.at(loads, (layer_C, batch_M[:, :, 0], home_C), served)
    return loads


def _packed_record(record: PlannerRecord, *, known: Detail) -> tuple[Detail, dict[str, str]]:
    arrays: dict[str, NDArray[Any]] = {
        "expert_tokens": record.expert_tokens_LME,
        "home": record.home_of_expert_LE,
        "flash_count": np.diff(record.flash_first_of_problem),
        "bound": record.bound_LM,
        "layer_us": record.layer_us_PLM,
        **{name: getattr(record, name) for name in (*FLASH, *STANDING)},
    }
    if not np.array_equal(rank_tokens_of(record), record.rank_tokens_LMR):
        arrays["rank_tokens"] = record.rank_tokens_LMR
    new: Detail = {}
    keys: dict[str, str] = {}
    for name, array in arrays.items():
        key = sha256(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
        keys[name] = key
        if key not in known and key not in new:
            new[key] = pack(array)
    return new, keys


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """{dtype, shape, data}: the array as text. Integers keep their values, other numbers become float32."""
    small = array.astype(_smallest(array) if array.dtype.kind in "biu" else np.float32)
    planes = np.ascontiguousarray(small).reshape(-1).view(np.uint8).reshape(-1, small.dtype.itemsize).T
    text = base64.b64encode(gzip.compress(planes.tobytes(), compresslevel=9, mtime=0)).decode()
    return {"dtype": f"{small.dtype.kind}{small.dtype.itemsize}", "shape": list(array.shape), "data": text}


def packed_size(arrays: dict[str, dict[str, Any]]) -> int:
    """Bytes of packed arrays on the page."""
    return sum(len(entry["data"]) for entry in arrays.values())


def _smallest(array: NDArray[Any]) -> str:
    """The smallest little-endian integer type that holds all values; float64 if none does."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    for name in INTEGERS:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return f"<{name}"
    return "<f8"
