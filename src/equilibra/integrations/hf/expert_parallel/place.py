"""What one MoE layer does under plans: recorded experts, pairs to slots, copies beside homes, one visit after another.

Symbols: T tokens of this rank, K experts per token, N rows that this rank computes, H homes of a rank, E experts.

A step's visits are in order: forward takes the next one, and a forward that backward repeats (activation checkpointing)
takes the one whose backward it is. Only the last forward can be repeated: several at once would come in an order that
nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe.functions import direction_now
from equilibra.integrations.hf.expert_parallel.copies import Exchange, carry
from equilibra.integrations.hf.sharded_experts import route_recorded
from equilibra.integrations.planned.slots import Visit

__all__ = ["Armed", "Place", "known_or_live", "to_slots"]

Run = Callable[[Tensor, Tensor], Tensor]
"""results of rows, given the slot of each among the weights that the module has"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Armed:
    """One micro-batch of a layer."""

    visit: Visit
    """where its pairs go"""
    recorded_TK: Tensor
    """its experts, -1 where they are routed live"""


class Place:
    """One layer's part in a plan."""

    def __init__(self, layer: int, group: ExpertGroup, experts: nn.Module, num_experts: int, spare_slots: int) -> None:
        self.layer, self.group, self.experts, self.num_experts = layer, group, experts, num_experts
        self.num_homes = num_experts // group.num_ranks
        self.num_slots = self.num_homes + spare_slots
        self.current: Armed | None = None
        """of the forward that is under way; None: no step is armed"""
        self._armed: list[Armed] | None = None
        self._done = dict.fromkeys((Direction.FORWARD, Direction.FORWARD_AGAIN), 0)

    def arm(self, micro_batches: list[Armed] | None) -> None:
        """The micro-batches of a step in order; None: no step."""
        self._armed, self.current = micro_batches, None
        self._done = dict.fromkeys(self._done, 0)

    def take(self) -> Armed | None:
        """The micro-batch of the forward that begins."""
        direction, begun = direction_now(), self._done[Direction.FORWARD]
        number = self._done[direction]
        if self._armed is None:
            if direction is Direction.FORWARD_AGAIN and not begun:
                raise ExecuteError(
                    f"activations of MoE layer {self.layer} are computed anew for a planned pass after its end(): "
                    "call end() when backward is through"
                )
            self._done[direction] += 1
            return None
        if direction is Direction.FORWARD and number >= len(self._armed):
            raise ExecuteError(
                f"forward {number + 1} of MoE layer {self.layer} has no plan: the step has {len(self._armed)} "
                "micro-batches; give all of them to begin(), arm() the step again for another pass, or end() it for "
                "passes that are not planned"
            )
        if direction is Direction.FORWARD_AGAIN and number != begun - 1:
            raise ExecuteError(
                f"activations of MoE layer {self.layer} are computed anew for micro-batch {number + 1} when {begun} "
                "have begun: with activation checkpointing run backward of each micro-batch, once, before the next "
                "forward"
            )
        self._done[direction] += 1
        return self._armed[number]

    def route(self, forward: Callable[..., Any], hidden: Tensor, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        """Begin a forward with the router of transformers, which chooses what was recorded."""
        self.current = self.take()
        if self.current is None:
            return forward(hidden, *more, **options)
        recorded_TK, num_tokens = self.current.recorded_TK, hidden.numel() // hidden.shape[-1]
        if len(recorded_TK) != num_tokens:
            raise InputError(
                f"MoE layer {self.layer} got {num_tokens} tokens, {len(recorded_TK)} were given to begin() for this "
                "micro-batch: give a row for every token, in this order, with -1 for padding"
            )
        return route_recorded(
            lambda: forward(hidden, *more, **options), recorded_TK.to(hidden.device), rows=None,
            num_experts=self.num_experts, layer=self.layer,
        )  # fmt: skip

    def run(self, run: Run, rows_ND: Tensor, slot_of_row: Tensor) -> Tensor:
        """Results of rows at homes and copies. Parameters of the module are those of its homes, whole."""
        assert self.current is not None
        visit = self.current.visit
        if not visit.num_copies:
            return run(rows_ND, slot_of_row)
        parts = dict(self.experts.named_parameters(recurse=False))
        exchange = Exchange(group=self.group, visit=visit, layer=self.layer)
        rows_ND, copies = carry(exchange, rows_ND, list(parts.values()))
        if not visit.num_held:
            return run(rows_ND, slot_of_row)
        of_copy = slot_of_row >= self.num_homes
        order = of_copy.argsort(stable=True)
        num = len(rows_ND) - int(of_copy.sum())
        rows_ND, slot_of_row = rows_ND.index_select(0, order), slot_of_row.index_select(0, order)
        results = run(rows_ND[:num], slot_of_row[:num])
        with _weights(self.experts, dict(zip(parts, copies, strict=True)), visit.num_held):
            more = run(rows_ND[num:], slot_of_row[num:] - self.num_homes)
        return torch.cat([results, more]).index_select(0, order.argsort())


@contextmanager
def _weights(experts: Any, parts: dict[str, Tensor], num: int) -> Iterator[None]:  # noqa: ANN401
    """The module with other experts for a while, in the way transformers itself gives it local tensors."""
    kept, kept_num = dict(experts._parameters), experts.num_experts  # noqa: SLF001
    experts._parameters.update(parts)  # noqa: SLF001
    experts.num_experts = num
    try:
        yield
    finally:
        experts._parameters.update(kept)  # noqa: SLF001
        experts.num_experts = kept_num


def to_slots(experts_TK: Tensor, visit: Visit) -> Tensor:
    """[T, K] the slot, among those of all ranks, of every pair. No sizes are read from the device."""
    taken = np.flatnonzero(visit.end_of_slot > visit.first_of_slot)
    taken = taken[np.lexsort((visit.first_of_slot[taken], visit.expert_of_slot[taken]))]
    num_experts = int(visit.expert_of_slot.max()) + 1
    width = experts_TK.numel() + 1  # of an expert's numbers: (expert, number of its pair) becomes one number
    first = np.minimum(visit.first_of_slot[taken], width - 1)
    key, slot = (
        torch.from_numpy(values).to(experts_TK.device)
        for values in (visit.expert_of_slot[taken] * width + first, taken)
    )
    experts = experts_TK.flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.long, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    begin = counts.cumsum(0) - counts
    ordered = experts.index_select(0, order)
    number = torch.arange(len(experts), device=experts.device) - begin.index_select(0, ordered)
    found = torch.searchsorted(key, ordered * width + number, right=True) - 1
    slots = torch.empty_like(experts)
    slots[order] = slot.index_select(0, found)
    return slots.view_as(experts_TK)


def known_or_live(ids_TK: Tensor) -> Tensor:
    """Ids with -1 in the rows that `count_routing` leaves out: those with a negative id or with an expert twice."""
    ordered = ids_TK.sort(dim=1).values
    known = (ordered[:, 0] >= 0) & (ordered[:, 1:] != ordered[:, :-1]).all(dim=1)
    return ids_TK.to(torch.long).masked_fill(~known[:, None], -1)
