"""Times and memory of deployments by the decode laws, disaggregated and colocated.

Colocated: groups of ranks hold the whole model, experts over expert-parallel times tensor-parallel ranks, attention
over data-parallel times tensor-parallel ranks of the same group. One micro-batch waits for its transfers; two overlap
them with each other's compute as well as they ever can, which favours the colocated side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.cost.decode import (
    CACHE_BYTES,
    Numbers,
    attention_us,
    cached_tokens,
    experts_us,
    nodes_of_token,
    outer_us,
    transfer_us,
)
from equilibra.plan.deployment.pipeline import iteration_us
from equilibra.plan.deployment.question import Question, Side

__all__ = ["Layout", "Times", "colocated_times", "times"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Deployments without their batch: arrays [N], or numbers for one."""

    attention_nodes: Numbers
    attention_tensor: Numbers
    expert_nodes: Numbers
    expert_tensor: Numbers
    micro_batches: Numbers

    @property
    def attention_ranks(self) -> Numbers:
        return self.attention_nodes * self.attention_tensor

    @property
    def expert_ranks(self) -> Numbers:
        return self.expert_nodes * self.expert_tensor

    def chosen(self, of: NDArray[np.bool_] | NDArray[np.int64] | int) -> Layout:
        """Some of them."""
        return Layout(**{name: np.asarray(values)[of] for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """Of deployments with a batch, in microseconds and bytes per rank."""

    t_a: Numbers
    t_e: Numbers
    t_c: Numbers
    outer: Numbers
    latency: Numbers
    attention_bytes: Numbers
    expert_bytes: Numbers
    fits: NDArray[np.bool_]
    """in memory"""


def times(question: Question, layout: Layout, batch: Numbers) -> Times:
    """A disaggregated deployment, by the laws."""
    model = question.model
    t_a, t_e, outer = _compute(question, question.attention, question.experts, layout, batch)
    links = _links(question, layout)
    t_c = _transfer(question, layout, batch, links)
    latency = layout.micro_batches * outer + iteration_us(
        t_a, t_e, t_c, layers=model.num_layers, micro_batches=layout.micro_batches
    )
    attention, experts = _memory(question, layout, batch)
    fits = (attention <= question.attention.room_bytes) & (experts <= question.experts.room_bytes)
    return Times(t_a=t_a, t_e=t_e, t_c=t_c, outer=outer, latency=latency, attention_bytes=attention,
                 expert_bytes=experts, fits=np.asarray(fits))  # fmt: skip


def colocated_times(question: Question, layout: Layout, batch: Numbers) -> Times:
    """Groups that hold the whole model, on the attention hardware."""
    side, model, m = question.attention, question.model, layout.micro_batches
    t_a, t_e, outer = _compute(question, side, side, layout, batch)
    outside = np.maximum(1 - side.prices.ranks_per_node / layout.expert_ranks, 0.0)
    link = 1 / np.maximum(outside / side.prices.nic_gb_per_s, (1 - outside) / side.prices.nvlink_gb_per_s)
    alone = layout.attention_nodes * layout.expert_nodes == 1
    t_c = np.where(alone, 0.0, _transfer(question, layout, batch, (link, link)))
    trip = t_a + t_e + 2 * t_c
    latency = m * outer + model.num_layers * np.where(
        m == 1, trip, np.maximum(np.maximum(m * (t_a + t_e), trip), m * t_c)
    )
    attention, experts = _memory(question, layout, batch)
    fits = np.asarray(attention + experts <= side.room_bytes)
    return Times(t_a=t_a, t_e=t_e, t_c=t_c, outer=outer, latency=latency, attention_bytes=attention,
                 expert_bytes=experts, fits=fits)  # fmt: skip


def _compute(
    question: Question, attention: Side, experts: Side, layout: Layout, batch: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    model, context = question.model, question.context
    t_a = attention_us(
        model, attention.law, attention.prices, context, batch=batch, tensor=layout.attention_tensor,
        nodes=layout.attention_nodes,
    )  # fmt: skip
    t_e = experts_us(
        model, experts.law, experts.prices, tokens=batch * layout.attention_nodes, nodes=layout.expert_nodes,
        tensor=layout.expert_tensor, imbalance=question.imbalance,
    )  # fmt: skip
    outer = outer_us(
        model, attention.law, context, batch=batch, tensor=layout.attention_tensor, nodes=layout.attention_nodes
    )
    return t_a, t_e, outer


def _links(question: Question, layout: Layout) -> tuple[Numbers, Numbers]:
    """GB/s of a rank of both sides: NVLink if all ranks share one node, else the network."""
    a, b = question.attention.prices, question.experts.prices
    together = layout.attention_ranks + layout.expert_ranks <= a.ranks_per_node
    together = np.asarray(together) & question.one_hardware
    return np.where(together, a.nvlink_gb_per_s, a.nic_gb_per_s), np.where(together, b.nvlink_gb_per_s, b.nic_gb_per_s)


def _transfer(question: Question, layout: Layout, batch: Numbers, links: tuple[Numbers, Numbers]) -> Numbers:
    """Each token is sent once to every expert node that computes for it, in slices from its tensor-parallel ranks."""
    model = question.model
    copies = batch * nodes_of_token(model, layout.expert_nodes) * model.hidden * model.weight_bytes
    sent, arrived = copies / layout.attention_tensor, copies * layout.attention_nodes / layout.expert_ranks
    latency = max(question.attention.law.transfer_us, question.experts.law.transfer_us)
    return transfer_us(latency, (sent, links[0]), (question.imbalance * arrived, links[1]))


def _memory(question: Question, layout: Layout, batch: Numbers) -> tuple[Numbers, Numbers]:
    """Bytes of a rank for attention (weights and cache, at the fullest node of three deviations) and for experts."""
    model, context = question.model, question.context
    layers = model.num_layers
    dense = layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
    sequences = batch * layout.micro_batches
    most = np.minimum(
        sequences * context.mean + 3 * context.deviation * np.sqrt(sequences), sequences * context.longest
    )
    most = np.maximum(most, context.longest)
    cache = cached_tokens(model, most, sequences) * model.cache_values * CACHE_BYTES * (layers + model.num_dense_layers)
    attention = dense * model.weight_bytes / layout.attention_tensor + cache / np.minimum(
        layout.attention_tensor, model.cache_heads
    )
    return attention, layers * model.num_experts * model.expert_bytes / layout.expert_ranks
