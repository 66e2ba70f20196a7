"""The cost model against measurements: fitted to some cases, compared on the others.

Fitted: the cases of the first recording on the fewest and on the most ranks, all shapes; if that leaves none to compare
with, on the fewest alone. Measurements are medians over repeats, of ranks without moves. Compared: every other case,
all contenders without moves. The time of a layer and micro-batch is that of its slowest rank, forward and backward
together: by its median over repeats, and by the laws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.contenders import BALANCED, EPLB, NAMES, STATIC, STILL_ONE
from benchmarks.gpu.records import Records, rank_times
from benchmarks.suite import Row
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.calibrate import calibrate
from equilibra.cost.presets import prices_named
from equilibra.cost.prices import Prices

ERROR_REACH = 0.05
MOST_PER_CASE = 120
"""measurements of a case and direction: more say nothing new"""
NOTHING_MOVES = (STATIC, EPLB, STILL_ONE, BALANCED)
RANK = ("layer", "micro_batch", "contender", "rank")

CaseResult = dict[str, Any]


def chosen_to_fit(cases: list[CaseResult]) -> list[str]:
    """Names of the cases to fit to; none if nothing would be left to compare with."""
    if not cases:
        return []
    first = [case for case in cases if case["recording"] == cases[0]["recording"]]
    ranks = sorted({case["ranks"] for case in first})
    for wanted in ({ranks[0], ranks[-1]}, {ranks[0]}):
        names = [case["case"] for case in first if case["ranks"] in wanted]
        if len(names) < len(cases):
            return names
    return []


def measurements_of(records: Records, case: CaseResult) -> list[dict[str, Any]]:
    """A case's measurements for the laws of experts."""
    rows = _still(records.of(case["case"]))
    _, first, number = np.unique(rows[list(RANK)], return_index=True, return_inverse=True)
    shape = {"kind": "experts", "hidden": case["hidden"], "expert_ffn": case["expert_ffn"]}
    found: list[dict[str, Any]] = []
    order = [at for at in np.argsort(rows["rows"][first], kind="stable") if rows["rows"][first[at]] > 0]
    kept = (
        [order[at] for at in np.unique(np.linspace(0, len(order) - 1, MOST_PER_CASE).round().astype(int))]
        if order
        else []
    )
    for at in kept:
        own = rows[number.reshape(-1) == at]
        size = {"instances": int(own["instances"][0]), "rows": int(own["rows"][0])}
        found += [
            {**shape, **size, "direction": direction, "us": float(np.median(own[f"{direction}_us"]))}
            for direction in ("forward", "backward")
        ]
    return found


def _still(rows: NDArray[Any]) -> NDArray[Any]:
    return rows[np.isin(rows["contender"], [NAMES.index(name) for name in NOTHING_MOVES])]


def calibration(records: Records, cases: list[CaseResult]) -> tuple[list[Row], list[dict[str, Any]], str]:
    """Rows of the table, the measurements that were fitted, and the note under the table."""
    fitted = chosen_to_fit(cases)
    measurements = [one for case in cases if case["case"] in fitted for one in measurements_of(records, case)]
    if not fitted:
        return [], [], "one case alone: nothing to compare a fit with"
    try:
        hardware = calibrate(measurements, prices_named("h200"), name="measured", source="bench gpu").hardware
    except InputError as error:
        return [], measurements, f"no law can be fitted: {error}"
    rows = [
        {"case": case["case"], "fitted": "yes" if case["case"] in fitted else "no",
         **_errors(records, case, hardware)}
        for case in cases
    ]  # fmt: skip
    others = [row for row in rows if row["fitted"] == "no"]
    mean = float(np.mean([row["mean_error"] for row in others]))
    worst = max(others, key=lambda row: row["largest_error"])
    within = np.mean([row["mean_error"] <= ERROR_REACH for row in others])
    note = (
        f"Fitted to {len(measurements)} measurements of {len(fitted)} cases. On the {len(others)} others the mean "
        f"error of a layer's time is {mean:.1%} (reach {ERROR_REACH:.0%}; {within:.0%} of the cases are within it), "
        f"the worst single layer {worst['largest_error']:.1%} ({worst['case']})."
    )
    return rows, measurements, note


def _errors(records: Records, case: CaseResult, hardware: Prices) -> Row:
    """Relative errors of layer times, over contenders, layers and micro-batches."""
    model = _model(case)
    measured, predicted = [], []
    for name in NOTHING_MOVES:
        rows = records.of(case["case"], name)
        measured.append(measured_us(rows))
        predicted.append(predicted_us(rows, model, hardware))
    error = np.concatenate(predicted) / np.concatenate(measured) - 1
    return {
        "measured_us": float(np.concatenate(measured).mean()), "predicted_us": float(np.concatenate(predicted).mean()),
        "mean_error": float(np.abs(error).mean()), "largest_error": float(np.abs(error).max()), "reach": ERROR_REACH,
        **{f"{name}_error": float((predicted[i] / measured[i] - 1).mean()) for i, name in enumerate(NOTHING_MOVES)},
    }  # fmt: skip


def measured_us(rows: NDArray[Any]) -> NDArray[np.float64]:
    """[layers x micro-batches] measured time of a contender's slowest rank, median over repeats."""
    order = np.lexsort((rows["repeat"], rows["rank"], rows["micro_batch"], rows["layer"]))
    repeats, ranks = np.unique(rows["repeat"]).size, np.unique(rows["rank"]).size
    us_CRQ = rank_times(rows[order]).reshape(-1, ranks, repeats)
    slowest_C: NDArray[np.float64] = np.median(us_CRQ, axis=2).max(axis=1)
    return slowest_C


def predicted_us(rows: NDArray[Any], model: MoEModel, hardware: Prices) -> NDArray[np.float64]:
    """[layers x micro-batches] predicted time of a contender's slowest rank."""
    once = rows[rows["repeat"] == rows["repeat"].min()]
    every = np.stack([once["layer"], once["micro_batch"]], axis=1)
    cells, number = np.unique(every, axis=0, return_inverse=True)
    us = [
        sum(
            law.time_us(model, rows=float(row["rows"]), instances=float(row["instances"]), backward=backward)
            for law, backward in ((hardware.experts_forward, False), (hardware.experts_backward, True))
        )
        for row in once
    ]
    result = np.zeros(len(cells))
    np.maximum.at(result, number.reshape(-1), us)
    return result


def _model(case: CaseResult) -> MoEModel:
    return MoEModel(
        name=case["model"], num_layers=1, hidden=case["hidden"], expert_ffn=case["expert_ffn"],
        num_experts=case["experts"], top_k=case["top_k"],
    )  # fmt: skip
