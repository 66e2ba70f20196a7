"""Fit the decode laws to measured layers, holding out half of the cases to report the laws' error.

A measurement (`benchmarks.probes.measure_decode`) has models by name and cases of three kinds: attention (batch,
context), experts (active instances, rows) and dense (batch, parameters), each with its microseconds.

Attention and dense products share constants, so they are fitted together. Both maxima of the attention law are linear
once it is known which part of each is larger: guess, fit non-negative least squares of relative errors, check the
guess, repeat. The experts' maximum is fitted likewise, from every first guess. A search in steps of the logarithms of
the constants then also fits what is not linear: the bends of the maxima, and a factor for each shape but the first. A
constant that no case determines keeps its value. Products of experts run at the rate of dense ones: with few shapes
that rate cannot be separated from the cost of moving rows, which scales differently to other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.calibrate import not_negative
from equilibra.cost.decode import CACHE_BYTES, ROW_NUMBERS, SHARP, DecodeLaw
from equilibra.cost.prices import ExpertLaw

Case = dict[str, Any]
Move = str | tuple[str, str]
"""a constant, or a table of factors and a shape"""
ROUNDS = 30
ATTENTION = ("attention_fixed_us", "weight_gb_per_s", "dense_tflops", "cache_gb_per_s", "sequence_us", "attention_bend",
             "factor_of_cache")  # fmt: skip
EXPERTS = ("fixed_us", "weight_gb_per_s", "instance_gb_per_s", "row_gb_per_s", "expert_bend",
           "factor_of_experts")  # fmt: skip
FIRST_BENDS = (1.2, 2.0, 4.0, 8.0, SHARP)
FIRST_STEP, LAST_STEP = 0.3, 0.002
"""step sizes in the logarithm of a constant"""


@dataclass(frozen=True, kw_only=True)
class DecodeFit:
    """A fitted law and its errors."""

    law: DecodeLaw
    errors: dict[str, dict[str, float]]
    """by kind and half (attention, fitted; attention, kept apart; ...): cases, mean, p90 and worst relative error"""


def fit_decode(measured: dict[str, Any], base: DecodeLaw, *, source: str) -> DecodeFit:
    """The law of every second case, and its errors on both halves."""
    try:
        models = {name: MoEModel(name=name, num_layers=1, **shape) for name, shape in measured["models"].items()}
        cases = [{**case, "shape": models[case["model"]]} for case in measured["cases"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"these are not measurements of decoding: {error}") from error
    kinds = {kind: [case for case in cases if case["kind"] == kind] for kind in ("attention", "dense", "experts")}
    if len(kinds["attention"]) < 8 or len(kinds["experts"]) < 12:
        raise InputError("too few measurements of decoding: 8 of attention and 12 of experts are the least")
    half = {kind: (some[::2], some[1::2]) for kind, some in kinds.items()}
    law, fixed_us = _fit_attention(half["attention"][0], half["dense"][0], replace(base, source=source))
    law = _polished(law, (*half["attention"][0], *half["dense"][0]), ATTENTION, fixed_us)
    law = replace(law, experts=_fit_experts(half["experts"][0], law.dense_tflops))
    law = _polished(law, half["experts"][0], EXPERTS, fixed_us)
    errors = {}
    for number, name in enumerate(("fitted", "kept apart")):
        for kind in ("attention", "dense", "experts"):
            some = half[kind][number]
            if some:
                predicted = np.array([_predicted(law, case, fixed_us) for case in some])
                errors[f"{kind}, {name}"] = _errors(predicted / np.array([case["us"] for case in some]) - 1)
    return DecodeFit(law=law, errors=errors)


def attention_predicted(law: DecodeLaw, model: MoEModel, *, batch: int, context: int) -> float:
    """Microseconds of a measured attention layer: as `decode.attention_us` on one rank."""
    weights, cache, multiplied, scored = _amounts(model, batch, context)
    factor = law.factor_of_cache.get(f"{model.cache_heads}x{model.cache_values}", 1.0)
    dense = _larger(weights / law.weight_gb_per_s, multiplied / law.dense_tflops, law.attention_bend)
    scores = _larger(factor * cache / law.cache_gb_per_s, scored / law.score_tflops, law.attention_bend)
    return law.attention_fixed_us + batch * law.sequence_us + dense + scores


def experts_predicted(law: DecodeLaw, model: MoEModel, *, active: int, rows: int) -> float:
    """Microseconds of a measured expert layer: as `decode.experts_us` on one rank."""
    of, factor = law.experts, law.factor_of_experts.get(f"{model.hidden}x{model.expert_ffn}", 1.0)
    moved = _row_kb(model) / of.row_gb_per_s if of.row_gb_per_s else 0.0
    products = active * of.instance_us(model) + rows * (moved + 2 * model.expert_parameters * 1e-6 / of.tflops)
    return of.fixed_us + factor * _larger(active * of.weights_us(model), products, law.expert_bend)


def _row_kb(model: MoEModel) -> float:
    """Kilobytes that a row moves."""
    of_hidden, of_ffn = ROW_NUMBERS
    return (of_hidden * model.hidden + of_ffn * model.expert_ffn) * model.weight_bytes * 1e-3


def _larger(a: float, b: float, bend: float) -> float:
    high, low = max(a, b), min(a, b)
    if bend >= SHARP:
        return high
    return high * (1 + (low / high) ** bend) ** (1 / bend) if high else 0.0


def _predicted(law: DecodeLaw, case: Case, dense_fixed_us: float) -> float:
    if case["kind"] == "experts":
        return experts_predicted(law, case["shape"], active=case["active"], rows=case["rows"])
    if case["kind"] == "attention":
        return attention_predicted(law, case["shape"], batch=case["batch"], context=case["context"])
    weights, multiplied = _product(case["parameters"], case["batch"])
    return dense_fixed_us + _larger(weights / law.weight_gb_per_s, multiplied / law.dense_tflops, law.attention_bend)


def _product(parameters: float, batch: float) -> tuple[float, float]:
    """KB of weights and MFLOP."""
    return parameters * 2e-3, 2 * batch * parameters * 1e-6


def _amounts(model: MoEModel, batch: int, context: int) -> tuple[float, float, float, float]:
    """KB of weights, kB of cache, MFLOP of products, MFLOP of scores of a measured attention layer."""
    size = model.attention_width / model.num_heads
    parameters = model.hidden * (2 * model.num_heads * size + model.cache_values + model.num_experts)
    weights, multiplied = _product(parameters, batch)
    tokens = batch * context
    return weights, tokens * model.cache_values * CACHE_BYTES * 1e-3, multiplied, 4 * tokens * model.score_width * 1e-6


def _fit_attention(attention: Sequence[Case], dense: Sequence[Case], base: DecodeLaw) -> tuple[DecodeLaw, float]:
    """The law without experts, and the fixed time of a dense product alone."""
    of_layer = [_amounts(case["shape"], case["batch"], case["context"]) for case in attention]
    of_head = [_product(case["parameters"], case["batch"]) for case in dense]
    layers = np.array([1.0] * len(attention) + [0.0] * len(dense))
    weights = np.array([w for w, *_ in of_layer] + [w for w, _ in of_head])
    flop = np.array([f for _, _, f, _ in of_layer] + [f for _, f in of_head])
    cache = np.array([c for _, c, _, _ in of_layer] + [0.0] * len(dense))
    score = np.array([s for *_, s in of_layer] + [0.0] * len(dense))
    batch = layers * np.array([case["batch"] for case in [*attention, *dense]], np.float64)
    us = np.array([case["us"] for case in [*attention, *dense]])
    x = np.array([0, 0, 1 / base.weight_gb_per_s, 1 / base.dense_tflops, 1 / base.cache_gb_per_s,
                  1 / base.score_tflops, 0])  # fmt: skip
    best, least = x, np.inf
    for _ in range(ROUNDS):
        reads, waits = weights * x[2] >= flop * x[3], cache * x[4] >= score * x[5]
        parts = [layers, 1 - layers, weights * reads, flop * ~reads, cache * waits, score * ~waits, batch]
        found = _where_known(np.stack(parts, axis=1), us, x)
        predicted = layers * found[0] + (1 - layers) * found[1] + batch * found[6] + np.maximum(
            weights * found[2], flop * found[3]
        ) + np.maximum(cache * found[4], score * found[5])  # fmt: skip
        error = float(np.square(predicted / us - 1).sum())
        if error < least:
            best, least = found, error
        if np.allclose(found, x):
            break
        x = found
    law = replace(
        base, attention_fixed_us=float(best[0]), weight_gb_per_s=float(1 / best[2]), dense_tflops=float(1 / best[3]),
        cache_gb_per_s=float(1 / best[4]), score_tflops=float(1 / best[5]), sequence_us=float(best[6]),
    )  # fmt: skip
    return law, float(best[1])


def _where_known(
    parts: NDArray[np.float64], us: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Fit non-negative coefficients; a rate that no case determines, or that comes out infinite, keeps its value."""
    known = (parts != 0).any(axis=0)
    found = before.copy()
    found[known] = not_negative(parts[:, known], us)
    rates = np.array([False, False, True, True, True, True, False])
    return np.where(rates & (found <= 0), before, found)


def _fit_experts(cases: Sequence[Case], tflops: float) -> ExpertLaw:
    """The law of least squared relative error over every first guess of which cases wait for weights."""
    us = np.array([case["us"] for case in cases])
    shapes, rows = [case["shape"] for case in cases], np.array([case["rows"] for case in cases], np.float64)
    weights = np.array([case["active"] * model.expert_bytes * 1e-3 for case, model in zip(cases, shapes, strict=True)])
    moved = rows * [_row_kb(model) for model in shapes]
    products = rows * [2 * model.expert_parameters * 1e-6 / tflops for model in shapes]
    few = rows / np.array([case["active"] for case in cases])
    best, least = ExpertLaw(fixed_us=0, weight_gb_per_s=1, row_gb_per_s=1, tflops=tflops), np.inf
    for limit in np.unique(few):
        waits = few <= limit
        for _ in range(ROUNDS):
            parts = [np.ones_like(us), weights * waits, weights * ~waits, moved * ~waits]
            x = not_negative(np.stack(parts, axis=1), us, products * ~waits)
            by_weights, by_rows = weights * x[1], weights * x[2] + moved * x[3] + products
            error = float(np.square((x[0] + np.maximum(by_weights, by_rows)) / us - 1).sum())
            if error < least:
                rates = [float(1 / each) if each > 0 else 0.0 for each in x[1:]]
                least, best = error, ExpertLaw(
                    fixed_us=float(x[0]), weight_gb_per_s=rates[0], instance_gb_per_s=rates[1], row_gb_per_s=rates[2],
                    tflops=tflops,
                )  # fmt: skip
            if np.array_equal(by_weights > by_rows, waits):
                break
            waits = by_weights > by_rows
    return best


def _polished(law: DecodeLaw, cases: Sequence[Case], names: Sequence[str], dense_fixed_us: float) -> DecodeLaw:
    """The law with these constants moved, one at a time, as long as the squared logarithmic error falls; the best of
    several first bends.
    """
    us = np.log([case["us"] for case in cases])
    shapes = {_shape_of(case, names[-1]): None for case in cases if case["kind"] != "dense"}

    def loss(changed: DecodeLaw) -> float:
        return float(np.square(np.log([_predicted(changed, case, dense_fixed_us) for case in cases]) - us).sum())

    moves: list[Move] = [*names[:-1], *[(names[-1], shape) for shape in list(shapes)[1:]]]
    bend = next(name for name in names if name.endswith("_bend"))
    starts: list[dict[str, Any]] = [{bend: first} for first in FIRST_BENDS]
    return min((_descended(replace(law, **start), moves, loss) for start in starts), key=loss)


def _descended(law: DecodeLaw, moves: Sequence[Move], loss: Callable[[DecodeLaw], float]) -> DecodeLaw:
    """Move constants until no step of any size helps."""
    least, step = loss(law), FIRST_STEP
    while step > LAST_STEP:
        before = least
        for move in moves:
            for times in (np.exp(step), np.exp(-step)):
                changed = _moved(law, move, float(times))
                if (found := loss(changed)) < least * (1 - 1e-9):
                    law, least = changed, found
                    break
        if least > before * (1 - 1e-3):
            step /= 2
    return law


def _shape_of(case: Case, factors: str) -> str:
    model = case["shape"]
    if factors == "factor_of_cache":
        return f"{model.cache_heads}x{model.cache_values}"
    return f"{model.hidden}x{model.expert_ffn}"


def _moved(law: DecodeLaw, move: Move, times: float) -> DecodeLaw:
    """The law with one constant multiplied; bends stay within their limits, and zeros stay zero."""
    if isinstance(move, tuple):
        name, shape = move
        factors = getattr(law, name)
        changed: dict[str, Any] = {name: {**factors, shape: factors.get(shape, 1.0) * times}}
        return replace(law, **changed)
    if move.endswith("_bend"):
        return replace(law, **{move: min(max(getattr(law, move) * times, 1.0), SHARP)})
    if hasattr(law, move):
        return replace(law, **{move: getattr(law, move) * times})
    return replace(law, experts=replace(law.experts, **{move: getattr(law.experts, move) * times}))


def _errors(error: NDArray[np.float64]) -> dict[str, float]:
    size = np.abs(error)
    return {"cases": float(size.size), "mean": float(size.mean()), "p90": float(np.quantile(size, 0.9)),
            "worst": float(size.max())}  # fmt: skip
