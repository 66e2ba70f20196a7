"""Times and memory of deployments by the decode laws: the ping-pong pipeline, and colocated groups.

    T_a, T_e, T_c   times of one micro-batch and layer: attention, experts, one transfer;  T_f = max(T_a, T_e)
    m, L            micro-batches in flight, layers;  S = T_a + T_e + 2 T_c

In the pipeline, micro-batches shuttle between the attention side and the expert side. Four servers stand in a ring:
attention, link there, experts, link back. Each takes one micro-batch at a time, in order, and micro-batch j begins
layer l + 1 when its layer l is back. `timeline` plays that out. Since times are equal for all micro-batches, its length
has a closed form, which `iteration_us` computes:

    max(S + T (m L - 1), L S + T (m - 1))      with T = max(T_a, T_e, T_c)

The left part is the paper's (T_a + T_e + 2 T_c) + T_f (m L - 1): it holds where T_c <= T_f and m T_f >= S, and then one
side never waits. The right part is a pipeline with too few micro-batches: each layer takes the whole round trip.

Colocated groups of ranks hold the whole model: experts over expert-parallel times tensor-parallel ranks, attention over
data-parallel times tensor-parallel ranks of the same group. One micro-batch waits for its transfers; two overlap them
perfectly with each other's compute, which favours the colocated side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
from equilibra.plan.deployment.question import Question, Side


class Server(StrEnum):
    """What works on a micro-batch, in the order of the ring."""

    ATTENTION = "attention"
    THERE = "to experts"
    EXPERTS = "experts"
    BACK = "to attention"


class Busy(NamedTuple):
    """The time in which a server works on one layer of a micro-batch."""

    server: Server
    layer: int
    micro_batch: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The paper's conditions under which transfers overlap fully."""

    balanced: bool
    """attention and experts take the same time, within a tenth"""
    transfer_hidden: bool
    """T_c < T_f"""
    enough_micro_batches: bool
    """m T_f >= 2 (T_f + T_c)"""

    @property
    def all_hold(self) -> bool:
        return self.balanced and self.transfer_hidden and self.enough_micro_batches


def conditions(t_a: float, t_e: float, t_c: float, micro_batches: int) -> Conditions:
    """The conditions that hold."""
    t_f = max(t_a, t_e)
    return Conditions(
        balanced=min(t_a, t_e) >= 0.9 * t_f,
        transfer_hidden=t_c < t_f,
        enough_micro_batches=micro_batches * t_f >= 2 * (t_f + t_c),
    )


def iteration_us(t_a: Numbers, t_e: Numbers, t_c: Numbers, *, layers: int, micro_batches: Numbers) -> Numbers:
    """Time for one token of every sequence of all micro-batches to pass all layers."""
    trip, slowest = t_a + t_e + 2 * t_c, np.maximum(np.maximum(t_a, t_e), t_c)
    return np.maximum(trip + slowest * (micro_batches * layers - 1), layers * trip + slowest * (micro_batches - 1))


def timeline(t_a: float, t_e: float, t_c: float, *, layers: int, micro_batches: int) -> list[Busy]:
    """The same iteration, played out server by server."""
    takes = dict(zip(Server, (t_a, t_c, t_e, t_c), strict=True))
    free = dict.fromkeys(Server, 0.0)
    back = [0.0] * micro_batches
    busy = []
    for layer in range(layers):
        for micro_batch in range(micro_batches):
            ready = back[micro_batch]
            for server in Server:
                start = max(ready, free[server])
                ready = free[server] = start + takes[server]
                busy.append(Busy(server, layer, micro_batch, start, ready))
            back[micro_batch] = ready
    return busy


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
        """The deployments of these indices."""
        return Layout(**{name: np.asarray(values)[of] for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """What deployments with a given batch take: microseconds, and bytes per rank."""

    t_a: Numbers
    t_e: Numbers
    t_c: Numbers
    outer: Numbers
    latency: Numbers
    memory_bytes: tuple[Numbers, Numbers]
    """of a rank of attention and of experts; colocated ranks hold both"""
    fits: NDArray[np.bool_]
    """whether that is at most the room of both sides"""


def times(question: Question, layout: Layout, batch: Numbers) -> Times:
    """Disaggregated deployments by the laws."""
    t_a, t_e, outer = _compute(question, question.attention, question.experts, layout, batch)
    t_c, m = _transfer(question, layout, batch, _links(question, layout)), layout.micro_batches
    latency = m * outer + iteration_us(t_a, t_e, t_c, layers=question.model.num_layers, micro_batches=m)
    attention, experts = memory = _memory(question, layout, batch)
    fits = (attention <= question.attention.room_bytes) & (experts <= question.experts.room_bytes)
    return Times(
        t_a=t_a, t_e=t_e, t_c=t_c, outer=outer, latency=latency, memory_bytes=memory, fits=np.asarray(fits)
    )  # fmt: skip


def colocated_times(question: Question, layout: Layout, batch: Numbers) -> Times:
    """Groups that hold the whole model, on the attention hardware."""
    side, m = question.attention, layout.micro_batches
    t_a, t_e, outer = _compute(question, side, side, layout, batch)
    outside = np.maximum(1 - side.prices.ranks_per_node / layout.expert_ranks, 0.0)
    link = 1 / np.maximum(outside / side.prices.nic_gb_per_s, (1 - outside) / side.prices.nvlink_gb_per_s)
    alone = layout.attention_nodes * layout.expert_nodes == 1
    t_c = np.where(alone, 0.0, _transfer(question, layout, batch, (link, link)))
    trip = t_a + t_e + 2 * t_c
    latency = m * outer + question.model.num_layers * np.where(
        m == 1, trip, np.maximum(np.maximum(m * (t_a + t_e), trip), m * t_c)
    )
    attention, experts = _memory(question, layout, batch)
    both = attention + experts
    return Times(
        t_a=t_a, t_e=t_e, t_c=t_c, outer=outer, latency=latency, memory_bytes=(both, both),
        fits=np.asarray(both <= side.room_bytes),
    )  # fmt: skip


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
    """GB/s of a rank of each side: NVLink if all ranks share one node, else the network."""
    a, b = question.attention.prices, question.experts.prices
    fit = np.asarray(layout.attention_ranks + layout.expert_ranks <= a.ranks_per_node)
    together = fit & question.one_hardware
    return np.where(together, a.nvlink_gb_per_s, a.nic_gb_per_s), np.where(together, b.nvlink_gb_per_s, b.nic_gb_per_s)


def _transfer(question: Question, layout: Layout, batch: Numbers, links: tuple[Numbers, Numbers]) -> Numbers:
    """Each token is sent once to every expert node that computes for it, in slices from its tensor-parallel ranks."""
    model = question.model
    copies = batch * nodes_of_token(model, layout.expert_nodes) * model.hidden * model.weight_bytes
    sent, arrived = copies / layout.attention_tensor, copies * layout.attention_nodes / layout.expert_ranks
    latency = max(question.attention.law.transfer_us, question.experts.law.transfer_us)
    return transfer_us(latency, (sent, links[0]), (question.imbalance * arrived, links[1]))


def _memory(question: Question, layout: Layout, batch: Numbers) -> tuple[Numbers, Numbers]:
    """Bytes of a rank for attention (weights, and caches three deviations above their mean) and for experts."""
    model, context, layers = question.model, question.context, question.model.num_layers
    dense = layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
    sequences = batch * layout.micro_batches
    most = sequences * context.mean + 3 * context.deviation * np.sqrt(sequences)
    most = np.maximum(np.minimum(most, sequences * context.longest), context.longest)
    cache = cached_tokens(model, most, sequences) * model.cache_values * CACHE_BYTES * (layers + model.num_dense_layers)
    weights = dense * model.weight_bytes / layout.attention_tensor
    attention = weights + cache / np.minimum(layout.attention_tensor, model.cache_heads)
    return attention, layers * model.num_experts * model.expert_bytes / layout.expert_ranks
