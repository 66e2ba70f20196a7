"""The slow and obvious search: every layout and every batch, one after another, timed by playing out the pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equilibra.cost import decode
from equilibra.plan.deployment.question import MEMORY_SHARE, Question, Side
from equilibra.plan.deployment.times import timeline


def powers(side: Side, parts: int) -> list[int]:
    return [n for n in (1, 2, 4, 8) if n <= side.prices.ranks_per_node and parts % n == 0]


def best(question: Question, most_batch: int) -> tuple[float, tuple[int, ...]] | None:
    """(tokens per second and rank or cost, layout) of the best deployment; None if there is none."""
    found = None
    for layout in every(question):
        for batch in range(1, most_batch + 1):
            value = value_of(question, layout, batch)
            if value is not None and (found is None or value > found[0]):
                found = value, (*layout, batch)
    return found


def every(question: Question) -> Iterator[tuple[int, int, int, int, int]]:
    """(attention nodes, their ranks, expert nodes, their ranks, micro-batches)."""
    model = question.model
    for n_a in range(1, question.max_ranks):
        for tp_a in powers(question.attention, model.num_heads):
            for n_e in range(1, model.num_experts + 1):
                for tp_e in powers(question.experts, model.expert_ffn):
                    if model.num_experts % n_e == 0 and n_a * tp_a + n_e * tp_e <= question.max_ranks:
                        for m in range(1, question.max_micro_batches + 1):
                            yield n_a, tp_a, n_e, tp_e, m


def value_of(question: Question, layout: tuple[int, int, int, int, int], batch: int) -> float | None:
    """None if memory or latency forbid it."""
    n_a, tp_a, n_e, tp_e, m = layout
    model, attention, experts, context = question.model, question.attention, question.experts, question.context
    dense = model.num_layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
    tokens = batch * m * context.mean + 3 * context.deviation * math.sqrt(batch * m)
    tokens = max(min(tokens, batch * m * context.longest), context.longest)
    cached = float(decode.cached_tokens(model, tokens, batch * m)) * model.cache_values * 2
    cached *= (model.num_layers + model.num_dense_layers) / min(tp_a, model.cache_heads)
    if dense * model.weight_bytes / tp_a + cached > MEMORY_SHARE * attention.prices.memory_bytes:
        return None
    held = model.num_layers * model.num_experts * model.expert_bytes / (n_e * tp_e)
    if held > MEMORY_SHARE * experts.prices.memory_bytes:
        return None
    t_a = float(
        decode.attention_us(model, attention.law, attention.prices, context, batch=batch, tensor=tp_a, nodes=n_a)
    )
    t_e = float(
        decode.experts_us(model, experts.law, experts.prices, tokens=batch * n_a, nodes=n_e, tensor=tp_e,
                          imbalance=question.imbalance)
    )  # fmt: skip
    outer = float(decode.outer_us(model, attention.law, context, batch=batch, tensor=tp_a, nodes=n_a))
    together = attention.prices == experts.prices and n_a * tp_a + n_e * tp_e <= attention.prices.ranks_per_node
    link = "nvlink_gb_per_s" if together else "nic_gb_per_s"
    size = batch * float(decode.nodes_of_token(model, n_e)) * model.hidden * model.weight_bytes
    sent = size / tp_a / getattr(attention.prices, link)
    arrived = size * n_a / n_e / tp_e * question.imbalance / getattr(experts.prices, link)
    t_c = max(attention.law.transfer_us, experts.law.transfer_us) + max(sent, arrived) * 1e-3
    played = timeline(t_a, t_e, t_c, layers=model.num_layers, micro_batches=m)
    latency = max(busy.end_us for busy in played) + m * outer
    if latency > question.latency_us:
        return None
    per = n_a * tp_a + n_e * tp_e
    if question.objective == "cost":
        per = (n_a * tp_a * attention.cost_per_hour + n_e * tp_e * experts.cost_per_hour) / 3600
    return batch * m * n_a * 1e6 / latency / per
