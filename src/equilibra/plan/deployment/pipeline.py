"""The ping-pong pipeline: micro-batches shuttle between the attention side and the expert side.

    T_a, T_e, T_c   times of one micro-batch and layer: attention, experts, one transfer;  T_f = max(T_a, T_e)
    m, L            micro-batches in flight, layers;  S = T_a + T_e + 2 T_c

Four servers stand in a ring: attention, link there, experts, link back. Each takes one micro-batch at a time, in order,
and micro-batch j begins layer l + 1 when its layer l is back. `timeline` plays that out. Since times are equal for all
micro-batches, its length has a closed form, which `iteration_us` computes:

    max(S + T (m L - 1), L S + T (m - 1))      with T = max(T_a, T_e, T_c)

The left part is the paper's (T_a + T_e + 2 T_c) + T_f (m L - 1): it holds where T_c <= T_f and m T_f >= S, and then one
side never waits. The right part is a pipeline with too few micro-batches: each layer takes the whole round trip.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from equilibra.cost.decode import Numbers

__all__ = ["Busy", "Conditions", "Server", "conditions", "iteration_us", "timeline"]


class Server(StrEnum):
    """What works on a micro-batch, in the order it comes by."""

    ATTENTION = "attention"
    THERE = "to experts"
    EXPERTS = "experts"
    BACK = "to attention"


class Busy(NamedTuple):
    """A server works on a layer of a micro-batch."""

    server: Server
    layer: int
    micro_batch: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The paper's conditions of full overlap."""

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
    """Which conditions of full overlap hold."""
    t_f = max(t_a, t_e)
    return Conditions(
        balanced=min(t_a, t_e) >= 0.9 * t_f,
        transfer_hidden=t_c < t_f,
        enough_micro_batches=micro_batches * t_f >= 2 * (t_f + t_c),
    )


def iteration_us(t_a: Numbers, t_e: Numbers, t_c: Numbers, *, layers: int, micro_batches: Numbers) -> Numbers:
    """One token for every sequence of all micro-batches through all layers."""
    trip, slowest = t_a + t_e + 2 * t_c, np.maximum(np.maximum(t_a, t_e), t_c)
    return np.maximum(
        trip + slowest * (micro_batches * layers - 1), layers * trip + slowest * (micro_batches - 1)
    )  # fmt: skip


def timeline(t_a: float, t_e: float, t_c: float, *, layers: int, micro_batches: int) -> list[Busy]:
    """The iteration, played out one micro-batch, layer and server after another."""
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
