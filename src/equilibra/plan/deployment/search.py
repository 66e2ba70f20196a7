"""The fastest deployment within a latency: the disaggregated one, and the colocated one with the same laws.

For fixed tensor-parallel sizes, nodes and micro-batches, every part of the time between tokens falls in proportion to
the batch when the batch grows (fixed parts, weights and latencies spread over more sequences), so throughput grows with
the batch until latency or memory forbids it. The best batch is therefore the largest that is allowed, and bisection
finds it. What remains is a grid of at most a few hundred thousand deployments, whose bisections run side by side as
arrays; only numbers of attention nodes above `EVERY_NODE` are thinned, to steps of 2 %.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import BudgetError, InputError
from equilibra.cost.decode import CACHE_BYTES, Numbers, cached_tokens
from equilibra.plan.deployment.question import MEMORY_SHARE, Plan, Question, Side
from equilibra.plan.deployment.times import Layout, Times, colocated_times, times

EVERY_NODE = 64
"""attention nodes up to which every number is tried"""
CHUNK = 8192
"""layouts searched at once: their arrays stay in a core's cache"""
MOST_SEQUENCES = 2**22
"""largest batch that is tried"""

Law = Callable[[Question, Layout, Numbers], Times]
LAWS: dict[str, Law] = {"disaggregated": times, "colocated": colocated_times}


def layouts(question: Question) -> Layout:
    """Every disaggregated deployment of at most `max_ranks` ranks."""
    model, most = question.model, question.max_ranks
    grid = np.meshgrid(
        _thinned(most), _tensor_sizes(question.attention, model.num_heads), _divisors(model.num_experts),
        _tensor_sizes(question.experts, model.expert_ffn), np.arange(1, question.max_micro_batches + 1), indexing="ij",
    )  # fmt: skip
    layout = Layout(
        **dict(zip(Layout.__dataclass_fields__, (part.ravel().astype(np.float64) for part in grid), strict=True))
    )
    return layout.chosen(np.asarray(layout.attention_ranks + layout.expert_ranks <= most))


def colocated_layouts(question: Question) -> Layout:
    """Every colocated group of at most `max_ranks` ranks; several groups give the same throughput per rank."""
    model, side = question.model, question.attention
    grid = np.meshgrid(
        _tensor_sizes(side, model.num_heads), _divisors(model.num_experts), _tensor_sizes(side, model.expert_ffn),
        np.array([1, 2] if question.overlap else [1]), indexing="ij",
    )  # fmt: skip
    tensor, nodes, expert_tensor, m = (part.ravel().astype(np.float64) for part in grid)
    ranks = nodes * expert_tensor
    good = (ranks % tensor == 0) & (ranks <= question.max_ranks)
    return Layout(
        attention_nodes=ranks / tensor, attention_tensor=tensor, expert_nodes=nodes, expert_tensor=expert_tensor,
        micro_batches=m,
    ).chosen(good)  # fmt: skip


def _thinned(most: int) -> NDArray[np.int64]:
    every = np.arange(1, min(most, EVERY_NODE) + 1)
    if most <= EVERY_NODE:
        return every
    steps = np.geomspace(EVERY_NODE, most, int(np.log(most / EVERY_NODE) * 50) + 2)
    return np.unique(np.concatenate([every, np.rint(steps).astype(np.int64)]))


def _tensor_sizes(side: Side, parts: int) -> NDArray[np.int64]:
    """Powers of 2 within a node that divide the heads or the experts' inner width."""
    return np.array([2**i for i in range(11) if 2**i <= side.prices.ranks_per_node and parts % 2**i == 0])


def _divisors(number: int) -> NDArray[np.int64]:
    return np.array([n for n in range(1, number + 1) if number % n == 0])


def best_disaggregated(question: Question) -> Plan:
    """The disaggregated deployment of highest throughput per rank or cost; InputError says why there is none."""
    return _best(question, layouts(question), "disaggregated")


def best_colocated(question: Question) -> Plan:
    """The best colocated deployment on the attention hardware; InputError says why there is none."""
    return _best(question, colocated_layouts(question), "colocated")


def _best(question: Question, layout: Layout, kind: str) -> Plan:
    law = LAWS[kind]
    if not np.size(layout.micro_batches):
        raise BudgetError(f"a {kind} deployment has a rank for each side: allow 2 or more, not {question.max_ranks}")
    batch = _largest_batch(question, layout, law)
    some = batch > 0
    if not some.any():
        _refuse(question, layout, kind)
    layout, batch = layout.chosen(some), batch[some]
    tokens = batch * layout.micro_batches * layout.attention_nodes / np.asarray(law(question, layout, batch).latency)
    value = tokens / (_cost(question, layout, kind) if question.objective == "cost" else _ranks(layout, kind))
    good = value >= value.max() * (1 - 1e-9)
    best = int(np.flatnonzero(good)[np.argmin(_ranks(layout, kind)[good])])  # the smallest of equal ones
    return _plan_of(question, layout.chosen(best), int(batch[best]), kind)


def _ranks(layout: Layout, kind: str) -> NDArray[np.float64]:
    experts = np.asarray(layout.expert_ranks, np.float64)
    return experts if kind == "colocated" else experts + layout.attention_ranks


def _cost(question: Question, layout: Layout, kind: str) -> NDArray[np.float64]:
    a, b = question.attention.cost_per_hour, question.experts.cost_per_hour
    if kind == "colocated":
        return np.asarray(layout.expert_ranks * a, np.float64)
    return np.asarray(layout.attention_ranks * a + layout.expert_ranks * b, np.float64) if a and b else np.zeros(1)


def _largest_batch(question: Question, layout: Layout, law: Law) -> NDArray[np.float64]:
    """[N] the largest batch within latency and memory; 0 where none is."""
    found = np.zeros(np.shape(layout.micro_batches))
    for first in range(0, found.size, CHUNK):
        part = np.arange(first, min(first + CHUNK, found.size))
        part = part[_allowed(question, layout.chosen(part), law, np.ones(part.size))]
        found[part] = _bisected(question, layout.chosen(part), law)
    return found


def _allowed(question: Question, layout: Layout, law: Law, batch: NDArray[np.float64]) -> NDArray[np.bool_]:
    found = law(question, layout, batch)
    return np.asarray((found.latency <= question.latency_us) & found.fits)


def _bisected(question: Question, layout: Layout, law: Law) -> NDArray[np.float64]:
    """[N] the largest allowed batch, of layouts that allow 1."""
    low = np.ones(np.shape(layout.micro_batches))
    high = np.full_like(low, _most_sequences(question))  # too large for any memory
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        good = _allowed(question, layout, law, middle) | (middle <= low)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


def _most_sequences(question: Question) -> int:
    """More than a node of the largest tensor-parallel size can hold."""
    side, model, context = question.attention, question.model, question.context
    tokens = cached_tokens(model, context.mean, 1.0)
    each = float(tokens) * model.cache_values * CACHE_BYTES * (model.num_layers + model.num_dense_layers)
    return int(min(side.room_bytes * side.prices.ranks_per_node / each + 2, MOST_SEQUENCES))


def _refuse(question: Question, layout: Layout, kind: str) -> None:
    """InputError: the memory that is missing, or the latency that a batch of one reaches."""
    model, context = question.model, question.context
    least = LAWS[kind](question, layout, np.ones(np.shape(layout.micro_batches)))
    if not least.fits.any():
        experts = model.num_layers * model.num_experts * model.expert_bytes
        cache = cached_tokens(model, context.longest, 1.0) * model.cache_values * CACHE_BYTES * model.num_layers
        raise BudgetError(
            f"{model.name} does not fit {kind} on {question.max_ranks} ranks of {question.attention.prices.name} and "
            f"{question.experts.prices.name}: experts take {experts / 1e9:.0f} GB, the cache of one sequence of "
            f"{context.longest:.0f} tokens {float(cache) / 1e9:.1f} GB, and {MEMORY_SHARE:.0%} of a rank's memory is "
            "used; allow more ranks, shorter sequences or larger devices"
        )
    fastest = float(np.where(least.fits, least.latency, np.inf).min())
    raise InputError(
        f"latency {question.latency_us * 1e-3:g} ms is out of reach of {kind} {model.name}: the fastest deployment of "
        f"at most {question.max_ranks} ranks takes {fastest * 1e-3:.1f} ms between tokens; allow more, or faster ones"
    )


def _plan_of(question: Question, layout: Layout, batch: int, kind: str) -> Plan:
    found = LAWS[kind](question, layout, float(batch))
    second = question.attention if kind == "colocated" else question.experts
    attention_bytes, expert_bytes = found.memory_bytes
    return Plan(
        kind=kind, hardware=(question.attention.prices.name, second.prices.name),
        attention_nodes=int(layout.attention_nodes), attention_tensor=int(layout.attention_tensor),
        expert_nodes=int(layout.expert_nodes), expert_tensor=int(layout.expert_tensor),
        micro_batches=int(layout.micro_batches), batch=batch, ranks=int(_ranks(layout, kind)),
        cost_per_hour=float(np.ravel(_cost(question, layout, kind))[0]), t_a_us=float(found.t_a),
        t_e_us=float(found.t_e), t_c_us=float(found.t_c), outer_us=float(found.outer),
        latency_us=float(found.latency), memory_bytes=(float(attention_bytes), float(expert_bytes)),
    )  # fmt: skip


def grown(question: Question, plan: Plan) -> str:
    """What keeps this plan's batch from growing: latency, memory, or both."""
    names = ("attention_nodes", "attention_tensor", "expert_nodes", "expert_tensor", "micro_batches")
    layout = Layout(**{name: np.float64(getattr(plan, name)) for name in names})
    found = LAWS[plan.kind](question, layout, plan.batch + 1.0)
    late, full = bool(found.latency > question.latency_us), not found.fits.all()
    return "latency and memory" if late and full else "latency" if late else "memory" if full else "nothing"
