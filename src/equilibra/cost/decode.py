"""Decode laws: the time of one layer's attention, experts and transfers for a micro-batch of one token per sequence.

Attention reads its weights once and the cached keys and values of every sequence, so it waits for memory; experts read
the weights of those that get a row, and wait for memory until rows are many; a transfer is a latency and bytes over the
slower of the two links. Tensor parallelism divides weights, products and key-value heads, and adds a reduction.

    attention  fixed + larger(weights / weight rate, FLOP / dense rate) + sequences * per sequence
               + larger(factor * cache / cache rate, FLOP / score rate) [+ reduction]
    experts    fixed + factor * larger(weights / rate, weights / rate of their own + row bytes / rate + FLOP / rate)
               over the experts that expect a row: `prices.ExpertLaw` with a factor and a bend [+ reduction]
    transfer   latency + max(bytes a rank sends / its link, bytes a rank receives / its link)

Where both parts of a maximum are close, reads and products hinder each other: larger(a, b) is (a^p + b^p)^(1/p), whose
bend p is fitted too. Factors are those of measured shapes, around 1.

The constants are an H200's (`measured/decode-h200.json`, fitted by `benchmarks.probes.decode_fit`); another device's
follow from the ratios of its compute and memory rates. Functions take numbers or arrays that broadcast. Each time
divided by the batch falls as the batch grows, on which the search of `plan.deployment` relies.

`Context` is the length of the sequences that are decoded at once. A long answer stays in the batch longer, so at any
moment long answers are over-represented and each is at an even chance anywhere in its length. For prompts of p tokens
and answers of a tokens, both random, the context of a sequence found in the batch has

    mean      E[a p] / E[a] + E[a²] / 2 E[a]            second moment  E[a (p² + p a + a²/3)] / E[a]

A batch that is always full sees these, not the mean answer: with a long tail they are several times it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibra.core.atomic import read_values
from equilibra.core.checks import check_number, shown
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.presets import checked_fields, prices_named, read_table
from equilibra.cost.prices import ExpertLaw, Prices

ROW_NUMBERS = 9, 6
"""numbers that a row reads and writes, in hidden and FFN widths: gathered (2, 0), multiplied (1, 2), activated (0, 3),
multiplied (1, 1), weighted (2, 0), added up (3, 0)"""
CACHE_BYTES = 2
"""bytes of one cached number: bf16"""
SHARP = 64.0
"""bend of a plain maximum"""

Numbers = float | NDArray[np.float64]
SAMPLES = 4096
"""answers that stand for a distribution of lengths"""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Tokens that a sequence in the batch has in the cache."""

    mean: float
    """over sequences and time"""
    deviation: float = 0.0
    """standard deviation of one sequence"""
    longest: float = 0.0
    """longest sequence, prompt and answer; 0: the mean"""
    mean_answer: float = 0.0
    """tokens of an answer, over answers; 0: unknown"""
    longest_answer: float = 0.0
    """tokens of the longest answer; 0: unknown"""

    def __post_init__(self) -> None:
        check_number("context", self.mean, low=1, high=1e8)
        for name in ("deviation", "longest", "mean_answer", "longest_answer"):
            check_number(f"context: {name}", getattr(self, name), high=1e9)
        if self.longest == 0:
            object.__setattr__(self, "longest", self.mean)


def context_of_lengths(answers: ArrayLike, prompts: ArrayLike = 0.0) -> Context:
    """The context in a batch kept full with answers and prompts of these lengths (one per answer, or one for all)."""
    a, p = np.broadcast_arrays(np.asarray(answers, np.float64), np.asarray(prompts, np.float64))
    if a.ndim != 1 or a.size == 0 or not np.isfinite(a).all() or a.min() < 1 or p.min() < 0 or a.max() + p.max() > 1e8:
        raise InputError("lengths must be a list of answers of 1 to 100 million tokens, and prompts of 0 or more")
    total = a.sum()
    mean = float((a * (p + a / 2)).sum() / total)
    square = float((a * (p * p + p * a + a * a / 3)).sum() / total)
    return Context(
        mean=mean, deviation=float(np.sqrt(max(square - mean * mean, 0.0))), longest=float((a + p).max()),
        mean_answer=float(a.mean()), longest_answer=float(a.max()),
    )  # fmt: skip


def lognormal_context(*, prompt: float, median: float, sigma: float, limit: float | None = None) -> Context:
    """Answers with a lognormal length, cut at a limit: a recipe's long tail."""
    check_number("median answer", median, low=1, high=1e8)
    check_number("sigma", sigma, high=4)
    check_number("prompt", prompt, high=1e8)
    if limit is not None:
        check_number("answer limit", limit, low=1)
    normal = NormalDist()
    steps = [normal.inv_cdf((i + 0.5) / SAMPLES) for i in range(SAMPLES)]
    answers = np.minimum(median * np.exp(sigma * np.array(steps)), inf if limit is None else limit)
    return context_of_lengths(np.maximum(answers, 1.0), prompt)


def context_of_file(path: Path, prompt: float | None = None) -> Context:
    """Lengths from JSON: a list of answers, {"answers": [...], "prompts": [...] or n}, or
    {"percentiles": {"50": n, ...}, "prompts": n} of answers, interpolated linearly. prompt: for files without prompts.
    """
    said = read_values(path)
    said = {"answers": said} if isinstance(said, list) else said
    if not isinstance(said, dict) or said.keys() - {"prompts"} not in ({"answers"}, {"percentiles"}):
        raise InputError(
            f"{path}: give a list of answer lengths, or an object with answers or percentiles, and prompts"
        )
    if prompt is not None and "prompts" in said:
        raise InputError(f"{path} has prompts: give no other")
    try:
        answers = said["answers"] if "answers" in said else _between(said["percentiles"])
        return context_of_lengths(answers, said.get("prompts", prompt or 0.0))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: lengths must be numbers ({error})") from error


def _between(length_of_share: dict[str, float]) -> NDArray[np.float64]:
    """Lengths of answers with these percentiles."""
    shares, lengths = np.array(sorted((float(k), float(v)) for k, v in length_of_share.items())).reshape(-1, 2).T
    if not (shares.size and shares[0] >= 0 and shares[-1] <= 100 and (np.diff(lengths) >= 0).all()):
        raise InputError("percentiles must be lengths that do not fall from 0 to 100")
    answers: NDArray[np.float64] = np.interp((np.arange(SAMPLES) + 0.5) * 100 / SAMPLES, shares, lengths)
    return answers


@dataclass(frozen=True, kw_only=True)
class DecodeLaw:
    """Constants of one device while decoding."""

    source: str
    """where the constants come from"""
    attention_fixed_us: float
    """launches and waits of a layer's attention, independent of size"""
    weight_gb_per_s: float
    """reading weights of dense products"""
    dense_tflops: float
    """dense products of many rows"""
    cache_gb_per_s: float
    """reading keys and values"""
    score_tflops: float
    """scores and their sums over values, where many heads share a cache"""
    sequence_us: float
    """cost per sequence: norms, rotations, writing its key and value"""
    experts: ExpertLaw
    """grouped products of few rows"""
    reduce_us: float
    """latency of one reduction among tensor-parallel ranks"""
    transfer_us: float
    """latency of one transfer between attention and experts"""
    attention_bend: float = SHARP
    """p of attention's maxima"""
    expert_bend: float = SHARP
    """p of the experts' maximum"""
    factor_of_cache: dict[str, float] = field(default_factory=dict)
    """measured over predicted time of reading caches, by "key-value heads x numbers" of a token (such as "4x1024")"""
    factor_of_experts: dict[str, float] = field(default_factory=dict)
    """measured over predicted time of experts, by "hidden x FFN" (such as "2048x768")"""

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name.endswith(("_us", "_gb_per_s", "_tflops")):
                above = None if one.name.endswith("_us") else 0.0
                check_number(f"decode law: {one.name}", getattr(self, one.name), above=above, high=inf)
        for name in ("attention_bend", "expert_bend"):
            check_number(f"decode law: {name}", getattr(self, name), low=1.0, high=SHARP)
        for factors in (self.factor_of_cache, self.factor_of_experts):
            if not isinstance(factors, dict):
                raise InputError(f"decode law: factors must be a table, not {factors!r}")
            for shape, value in factors.items():
                check_number(f"decode law: factor of {shape}", value, above=0.0, high=10.0)

    def scaled(self, *, compute: float, memory: float) -> DecodeLaw:
        """The law on a device with these multiples of the compute and memory rates."""
        return replace(
            self, dense_tflops=self.dense_tflops * compute, score_tflops=self.score_tflops * compute,
            weight_gb_per_s=self.weight_gb_per_s * memory, cache_gb_per_s=self.cache_gb_per_s * memory,
            experts=self.experts.scaled(compute=compute, memory=memory),
        )  # fmt: skip


def _law(table: object, where: str) -> DecodeLaw:
    """The law with these fields; InputError if some are unknown or missing."""
    if not isinstance(table, dict) or not isinstance(table.get("experts"), dict):
        raise InputError(f"{where}: a decode law must be a table with a table experts, not {shown(table)}")
    experts = ExpertLaw(**checked_fields(table["experts"], ExpertLaw, f"{where}, experts"))
    return DecodeLaw(**{**checked_fields(table, DecodeLaw, where), "experts": experts})


@cache
def _h200_law() -> DecodeLaw:
    text = files("equilibra.cost").joinpath("measured/decode-h200.json").read_text()
    return _law(json.loads(text), "measured/decode-h200.json")


def decode_law(prices: Prices, of_h200: DecodeLaw | None = None) -> DecodeLaw:
    """The law of a device, by the ratios of its rates to the H200's; `of_h200` replaces the kept constants."""
    base, law = prices_named("h200"), of_h200 or _h200_law()
    compute, memory = prices.dense_tflops / base.dense_tflops, prices.hbm_gb_per_s / base.hbm_gb_per_s
    return law if prices.name == base.name else law.scaled(compute=compute, memory=memory)


def load_law(path: Path) -> DecodeLaw:
    """An H200 law from a file that `python -m benchmarks.probes.measure_decode --fit` wrote."""
    table = read_table(path)
    return _law(table.get("law", table), str(path))


def check_decodes(model: MoEModel) -> None:
    """InputError if the model's attention has no decode law."""
    if not model.num_heads or not model.cache_values:
        raise InputError(
            f"model {model.name}: its attention is unknown (num_heads, cache_heads, cache_values, score_width); decode "
            "laws cover grouped-query attention and multi-head latent attention: take a preset or a config.json"
        )
    if model.quadratic_share < 1 and not model.window:
        raise InputError(
            f"model {model.name}: {1 - model.quadratic_share:.0%} of its layers are linear or of unknown window; "
            "decode laws cover full and windowed attention only"
        )


def cached_tokens(model: MoEModel, tokens: Numbers, sequences: Numbers) -> Numbers:
    """Tokens in the cache of the mean layer, for sequences that have `tokens` together."""
    if model.quadratic_share == 1:
        return tokens
    return model.quadratic_share * tokens + (1 - model.quadratic_share) * np.minimum(tokens, sequences * model.window)


def slowest_tokens(context: Context, sequences: Numbers, nodes: Numbers) -> Numbers:
    """Cached tokens on the fullest of several nodes of equal batch: the mean and the expected largest deviation."""
    return sequences * context.mean + context.deviation * np.sqrt(2 * np.log(np.maximum(nodes, 1.0)) * sequences)


def attention_us(
    model: MoEModel, law: DecodeLaw, prices: Prices, context: Context, *, batch: Numbers, tensor: Numbers,
    nodes: Numbers,
) -> Numbers:  # fmt: skip
    """A layer's attention, router and shared experts, on the slowest of `nodes` with `batch` sequences each."""
    dense = _dense_us(model, law, model.dense_parameters / tensor, batch)
    return (
        law.attention_fixed_us + dense + batch * law.sequence_us
        + _scores_us(model, law, context, batch=batch, tensor=tensor, nodes=nodes)
        + _reduce_us(law, prices, batch * model.hidden * model.weight_bytes, tensor)
    )  # fmt: skip


def _scores_us(
    model: MoEModel, law: DecodeLaw, context: Context, *, batch: Numbers, tensor: Numbers, nodes: Numbers
) -> Numbers:
    tokens = cached_tokens(model, slowest_tokens(context, batch, nodes), batch)
    read = tokens * model.cache_values * CACHE_BYTES / np.minimum(tensor, model.cache_heads)
    flop = 4 * tokens * model.score_width / tensor
    factor = law.factor_of_cache.get(f"{model.cache_heads}x{model.cache_values}", 1.0)
    reading, scoring = factor * read * 1e-3 / law.cache_gb_per_s, flop * 1e-6 / law.score_tflops
    return larger(reading, scoring, law.attention_bend)


def _dense_us(model: MoEModel, law: DecodeLaw, weights: Numbers, batch: Numbers) -> Numbers:
    """The product of `batch` rows with this many weights."""
    reading = weights * model.weight_bytes * 1e-3 / law.weight_gb_per_s
    return larger(reading, 2 * batch * weights * 1e-6 / law.dense_tflops, law.attention_bend)


def larger(a: Numbers, b: Numbers, bend: float) -> Numbers:
    """The larger of two times, more where they are close: (a^p + b^p)^(1/p)."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    if bend >= SHARP:
        return high
    share = low / np.maximum(high, 1e-300)
    return np.asarray(high * (1 + share**bend) ** (1 / bend), np.float64)


def outer_us(
    model: MoEModel, law: DecodeLaw, context: Context, *, batch: Numbers, tensor: Numbers, nodes: Numbers
) -> Numbers:
    """Dense layers and output head of one micro-batch; nothing is assumed to overlap with them."""
    dense = _dense_us(model, law, model.outer_parameters / tensor, batch)
    layer = law.attention_fixed_us + _scores_us(model, law, context, batch=batch, tensor=tensor, nodes=nodes)
    return dense + model.num_dense_layers * layer


def experts_us(
    model: MoEModel, law: DecodeLaw, prices: Prices, *, tokens: Numbers, nodes: Numbers, tensor: Numbers,
    imbalance: float,
) -> Numbers:  # fmt: skip
    """A layer's experts on the slowest of `nodes`, for `tokens` of all attention nodes together."""
    each = model.num_experts / nodes
    active = each * -np.expm1(tokens * np.log1p(-min(model.top_k / model.num_experts, 1 - 1e-12)))
    rows = imbalance * tokens * model.top_k / nodes
    experts = law.experts
    weights = active * model.expert_bytes / tensor * 1e-3
    of_hidden, of_ffn = ROW_NUMBERS
    moved = rows * (of_hidden * model.hidden + of_ffn * model.expert_ffn / tensor) * model.weight_bytes * 1e-3
    products = _over(moved, experts.row_gb_per_s) + _over(
        2 * rows * model.expert_parameters / tensor * 1e-6, experts.tflops
    )
    factor = law.factor_of_experts.get(f"{model.hidden}x{model.expert_ffn}", 1.0)
    own = _over(weights, experts.instance_gb_per_s)
    waits = factor * larger(_over(weights, experts.weight_gb_per_s), own + products, law.expert_bend)
    arrived = imbalance * tokens * nodes_of_token(model, nodes) / nodes * model.hidden * model.weight_bytes
    return experts.fixed_us + waits + _reduce_us(law, prices, arrived, tensor)


def _over(amount: Numbers, rate: float) -> Numbers:
    return amount / rate if rate else amount * 0.0


def nodes_of_token(model: MoEModel, nodes: Numbers) -> Numbers:
    """Expert nodes that a token goes to, on average over evenly chosen experts: it is sent once to each."""
    each = model.num_experts / np.asarray(nodes, np.float64)
    missed = np.ones_like(each)
    for chosen in range(model.top_k):
        missed = missed * np.maximum(model.num_experts - each - chosen, 0) / (model.num_experts - chosen)
    return np.asarray(nodes * (1 - missed), np.float64)


def _reduce_us(law: DecodeLaw, prices: Prices, size_bytes: Numbers, tensor: Numbers) -> Numbers:
    """An all-reduce inside the node; nothing on one rank."""
    ring = 2 * (tensor - 1) / tensor * size_bytes * 1e-3 / prices.nvlink_gb_per_s
    return np.where(np.asarray(tensor) > 1, law.reduce_us + ring, 0.0)


def transfer_us(latency_us: float, sent: tuple[Numbers, Numbers], received: tuple[Numbers, Numbers]) -> Numbers:
    """One transfer; (bytes, GB/s of the link) of the rank that sends and of the rank that receives most."""
    return latency_us + np.maximum(sent[0] * 1e-3 / sent[1], received[0] * 1e-3 / received[1])
