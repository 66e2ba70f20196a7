"""Calibrate: fit constants of the cost model to measurements.

A measurement has a kind, its amounts of work, and the microseconds it took. Kinds: `experts` (hidden, expert_ffn,
instances, rows, direction), `dense` and `attention` (flop; attention has a direction), `memory`, `host_copy`,
`copy_engine`, `nvlink` and `nic` (bytes), `counts` (microseconds alone), `hidden_copy` (bytes, us with a copy,
us_alone). `benchmarks/probes/measure_device.py` makes them; so does every measured run (`measurements_of_run`).

Non-negative least squares of relative errors; rates are fitted as fixed + amount / rate. The experts' law is a maximum
of two linear parts: assign every case to the larger part, fit both, repeat until stable, from two initial guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.prices import ExpertLaw, Prices
from equilibra.events.schema import Direction, Events, Kind, Resource

Measurement = dict[str, Any]
RATES = (
    ("attention", "forward", "flop", "attention_tflops", ""),
    ("attention", "backward", "flop", "attention_backward_tflops", ""),
    ("dense", "", "flop", "dense_tflops", ""),
    ("memory", "", "bytes", "hbm_gb_per_s", ""),
    ("host_copy", "", "bytes", "host_link_gb_per_s", ""),
    ("copy_engine", "", "bytes", "copy_engine_gb_per_s", ""),
    ("nvlink", "", "bytes", "nvlink_gb_per_s", "nvlink_latency_us"),
    ("nic", "", "bytes", "nic_gb_per_s", "nic_latency_us"),
)
"""kind, direction if it has one, amount of work, rate, and latency if its fixed time has a price"""
KINDS = {*(kind for kind, *_ in RATES), "experts", "counts", "hidden_copy", "device_copy"}
LEAST_POINTS_OF_SHAPE = 3


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted prices and the errors of the fit."""

    hardware: Prices
    """the base with fitted constants"""
    errors: dict[str, tuple[int, float, float]]
    """by fitted constant: number of cases, mean and largest relative error"""


def calibrate(measurements: Sequence[Measurement], base: Prices, *, name: str, source: str) -> Calibration:
    """The base with every constant replaced that the measurements determine.

    New measurements of experts invalidate the base's prices of our kernels, which are then dropped.
    """
    _check(measurements)
    changes: dict[str, Any] = {"name": name, "source": source}
    errors: dict[str, tuple[int, float, float]] = {}

    def chosen(kind: str, direction: str = "") -> list[Measurement]:
        return [m for m in measurements if m["kind"] == kind and direction in ("", m.get("direction"))]

    for direction in ("forward", "backward"):
        if cases := chosen("experts", direction):
            law, error = fit_experts(cases, backward=direction == "backward")
            changes |= {"kernels": None, f"experts_{direction}": law}
            errors[f"experts_{direction}"] = _summary(error)
    for kind, direction, amount, rate, latency in RATES:
        if cases := chosen(kind, direction):
            fixed_us, changes[rate], error = _rate(cases, amount)
            errors[rate] = _summary(error)
            if latency:
                changes[latency] = fixed_us
    if cases := chosen("counts"):
        changes["counts_us"] = float(np.median([m["us"] for m in cases]))
    if cases := chosen("hidden_copy"):
        changes["copy_loss_gb_per_s"] = _copy_loss(cases)
    return Calibration(hardware=replace(base, **changes), errors=errors)


def fit_experts(cases: Sequence[Measurement], *, backward: bool) -> tuple[ExpertLaw, NDArray[np.float64]]:
    """The experts' law in one direction, and its relative error on every case."""
    if len(cases) < 4:
        raise InputError(f"{len(cases)} measurements of experts cannot determine five constants: measure 4 or more")
    shapes = [
        MoEModel(name="measured", num_layers=1, hidden=m["hidden"], expert_ffn=m["expert_ffn"], num_experts=1, top_k=1)
        for m in cases
    ]
    us = np.array([m["us"] for m in cases], np.float64)
    rows, instances = (np.array([m[key] for m in cases], np.float64) for key in ("rows", "instances"))
    passes = 2 if backward else 1
    weight_kb = instances * [shape.expert_bytes for shape in shapes] * 1e-3
    row_kb = passes * rows * [(2 * s.hidden + 6 * s.expert_ffn) * s.weight_bytes for s in shapes] * 1e-3
    mflop = passes * rows * [2 * shape.expert_parameters for shape in shapes] * 1e-6
    found = _larger_of_two(us, weight_kb, row_kb, mflop)
    rates = [float(1 / x) if x > 0 else 0.0 for x in found[1:]]
    law = ExpertLaw(
        fixed_us=float(found[0]), weight_gb_per_s=rates[0], row_gb_per_s=rates[1], tflops=rates[2],
        instance_gb_per_s=rates[3],
    )  # fmt: skip
    by_weights, by_instances, by_rows = weight_kb * found[1], weight_kb * found[4], row_kb * found[2] + mflop * found[3]
    ratio = (us - found[0] - by_instances) / by_rows
    law = replace(law, factor_of_shape=_factors(cases, ratio, by_instances + by_rows > by_weights))
    predicted = [
        law.time_us(shape, rows=m["rows"], instances=m["instances"], backward=backward)
        for shape, m in zip(shapes, cases, strict=True)
    ]
    return law, np.array(predicted) / us - 1


def _larger_of_two(
    us: NDArray[np.float64], weight_kb: NDArray[np.float64], row_kb: NDArray[np.float64], mflop: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[5] fixed us, then us per unit of weights, rows, products and instances (the last with rows and products)."""
    found, least = np.zeros(5), np.inf
    for guess in (weight_kb > row_kb + mflop / 200, np.zeros_like(us, np.bool_)):
        waits = guess  # whether the case waits for weights
        for _ in range(40):
            parts = (weight_kb * waits, row_kb * ~waits, mflop * ~waits, weight_kb * ~waits)
            x = not_negative(np.stack([np.ones_like(us), *parts], axis=1), us)
            by_weights, by_rows = weight_kb * x[1], row_kb * x[2] + mflop * x[3] + weight_kb * x[4]
            error = float(np.square((x[0] + np.maximum(by_weights, by_rows)) / us - 1).mean())
            if error < least and (x[2] > 0 or x[3] > 0):
                found, least = x, error
            if np.array_equal(by_weights > by_rows, waits):
                break
            waits = by_weights > by_rows
    if not np.isfinite(least):
        raise InputError("the measurements of experts hardly depend on rows: measure cases with more rows")
    return found


def _factors(
    cases: Sequence[Measurement], ratio: NDArray[np.float64], waits_for_rows: NDArray[np.bool_]
) -> dict[str, float]:
    """Median of measured over predicted time, for shapes with enough measurements."""
    names = np.array([f"{m['hidden']}x{m['expert_ffn']}" for m in cases])
    factors = {}
    for name in sorted(set(names.tolist())):
        own = ratio[(names == name) & waits_for_rows]
        if own.size >= LEAST_POINTS_OF_SHAPE:
            factors[name] = round(float(np.clip(np.median(own), 0.2, 5.0)), 4)
    return factors


def measurements_of_run(model: MoEModel, events: Events, *, experts_per_rank: int) -> list[Measurement]:
    """Measurements of experts, links, copies and counts from a run's events."""
    shape = {"hidden": model.hidden, "expert_ffn": model.expert_ffn, "instances": experts_per_rank}
    rows = events.rows[events.rows["end_us"] > events.rows["start_us"]]
    found: list[Measurement] = []
    for row in rows[np.isin(rows["kind"], (Kind.EXPERTS, Kind.FLASH_COPY, Kind.COUNTS))]:
        us, size = float(row["end_us"] - row["start_us"]), int(row["bytes"])
        if row["kind"] == Kind.COUNTS:
            found.append({"kind": "counts", "us": us})
        elif row["kind"] == Kind.FLASH_COPY and size > 0:
            found.append({"kind": "copy_engine", "bytes": size, "us": us})
        elif row["kind"] == Kind.EXPERTS and row["tokens"] > 0:
            direction = "backward" if row["direction"] == Direction.BACKWARD else "forward"
            found.append({"kind": "experts", **shape, "direction": direction, "rows": int(row["tokens"]), "us": us})
    return found + _links_of_run(rows)


def _links_of_run(rows: NDArray[np.void]) -> list[Measurement]:
    """All-to-alls, each timed on the rank that arrived last: the others waited for it."""
    rows = rows[np.isin(rows["kind"], (Kind.DISPATCH, Kind.COMBINE)) & (rows["bytes"] > 0)]
    found: list[Measurement] = []
    for resource, name in ((Resource.NVLINK, "nvlink"), (Resource.NIC, "nic")):
        chosen = rows[rows["resource"] == resource]
        keys = chosen[["kind", "stage", "direction", "layer", "micro_batch"]]
        took = chosen["end_us"] - chosen["start_us"]
        for key in np.unique(keys):
            same = np.flatnonzero(keys == key)
            last = same[int(took[same].argmin())]
            found.append({"kind": name, "bytes": int(chosen["bytes"][last]), "us": float(took[last])})
    sizes = {m["bytes"] for m in found}
    return found if len(sizes) > 1 else []


def _rate(cases: Sequence[Measurement], amount: str) -> tuple[float, float, NDArray[np.float64]]:
    """(fixed us, TFLOP/s or GB/s, relative errors) of fixed + amount / rate."""
    us = np.array([m["us"] for m in cases], np.float64)
    size = np.array([m[amount] for m in cases], np.float64) * (1e-6 if amount == "flop" else 1e-3)
    x = not_negative(np.stack([np.ones_like(us), size], axis=1), us)
    if x[1] <= 0:
        raise InputError(f"the measurements of {cases[0]['kind']} do not grow with {amount}: measure larger cases")
    return float(x[0]), float(1 / x[1]), (x[0] + size * x[1]) / us - 1


def _copy_loss(cases: Sequence[Measurement]) -> float:
    """Rate at which hidden copies cost compute time; their fixed launch cost is not counted.

    The lost time is a small difference of large ones, so all cases weigh the same; no slope gives 100 TB/s.
    """
    lost = np.array([m["us"] - m["us_alone"] for m in cases], np.float64)
    size = np.array([m["bytes"] for m in cases], np.float64) * 1e-3
    if len(set(size.tolist())) < 2:
        raise InputError("hidden copies of one size cannot show the cost per byte: measure two sizes or more")
    slope = float(np.polyfit(size, lost, 1)[0])
    return 1 / max(slope, 1e-5)


def not_negative(
    parts: NDArray[np.float64], us: NDArray[np.float64], known_us: NDArray[np.float64] | float = 0.0
) -> NDArray[np.float64]:
    """Non-negative coefficients with the least squared relative error; tries every subset of the few parts.

    known_us: what else takes time.
    """
    scaled, width, wanted = parts / us[:, None], parts.shape[1], 1 - known_us / us
    found, least = np.zeros(width), np.inf
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            x, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            error = float(np.square(scaled[:, chosen] @ x - wanted).sum())
            if (x >= 0).all() and error < least - 1e-12:
                found, least = np.zeros(width), error
                found[list(chosen)] = x
    return found


def _summary(error: NDArray[np.float64]) -> tuple[int, float, float]:
    return error.size, float(np.abs(error).mean()), float(np.abs(error).max())


def _check(measurements: Sequence[Measurement]) -> None:
    need = {"experts": ("hidden", "expert_ffn", "instances", "rows"), "dense": ("flop",), "attention": ("flop",),
            "hidden_copy": ("bytes", "us_alone"), "counts": ()}  # fmt: skip
    for number, m in enumerate(measurements):
        if not isinstance(m, dict) or str(m.get("kind")) not in KINDS:
            raise InputError(f"measurement {number} has no known kind; use one of {', '.join(sorted(KINDS))}: {m!r}")
        for key in (*need.get(m["kind"], ("bytes",)), "us"):
            value = m.get(key)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-9 < value < 1e18:
                raise InputError(f"measurement {number} ({m['kind']}): {key} must be from 1e-9 to 1e18, not {value!r}")
        if m["kind"] in ("experts", "attention") and m.get("direction") not in ("forward", "backward"):
            raise InputError(f"measurement {number} ({m['kind']}): direction must be forward or backward")
    if not measurements:
        raise InputError("no measurements to fit")
