"""What one MoE layer does under plans: replay recorded experts, send pairs to slots, run copies beside homes.

Symbols: T tokens of this rank, K experts per token, N rows that this rank computes, H homes, C copies that it holds.

A part is a stacked parameter [H, ...] of a layer's homes. Rows pass through `carry`'s autograd function. So every rank
joins the exchange of gradients, even with no copy of its own, and does so before it sends gradients of rows. Gradients
of copies are added to the stacked parameter's gradient, which FSDP reduces.

FSDP owns the parameters and gathers them around each pass, so copies are made and kept inside autograd, not by the
runtime's engines: a copy travels as one line per part, and gradients are summed in the order of the holding ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.visit import CopyList
from equilibra.execute.group import Channel, ExpertGroup, Pending
from equilibra.integrations.executor.visits import LayerVisits
from equilibra.integrations.hf.sharded_experts import route_recorded
from equilibra.integrations.planned import SlotTable

__all__ = ["Arriving", "TransformersVisits", "carry", "exchange", "known_or_live", "to_slots"]

Run = Callable[[Tensor, Tensor], Tensor]
"""results of rows, given rows and the slot of each among the module's weights"""


class Arriving(NamedTuple):
    """Lines in transit."""

    parts: list[Tensor]
    """[lines, ...] each, valid after `wait`"""
    pending: list[Pending]

    def wait(self) -> list[Tensor]:
        for one in self.pending:
            one.wait()
        return self.parts


def exchange(group: ExpertGroup, copies: CopyList, parts: Sequence[Tensor], *, home: bool) -> Arriving:
    """Collective: start sending all parts [lines, ...], weights to the holders or gradients home."""
    channel = Channel.GRADIENTS if home else Channel.COPIES
    sizes, received_sizes = copies.served_sizes, copies.held_sizes
    if home:
        sizes, received_sizes = received_sizes, sizes
    what = f"{'returning gradients of' if home else 'fetching'} copies of MoE layer {copies.layer}"
    received = [part.new_empty(sum(received_sizes), *part.shape[1:]) for part in parts]
    return Arriving(received, [
        group.all_to_all(channel, sent.contiguous(), sizes, into, received_sizes, what=what)
        for sent, into in zip(parts, received, strict=True)
    ])  # fmt: skip


def sum_copies(lines: Tensor, served: Sequence[int]) -> dict[int, Tensor]:
    """The sum over the lines of each home slot's copies, by slot. served: the home slot of each line."""
    wide = torch.promote_types(lines.dtype, torch.float32)
    totals = {slot: lines.new_zeros(lines.shape[1:], dtype=wide) for slot in sorted(set(served))}
    for line, slot in zip(lines, served, strict=True):
        totals[slot] += line
    return totals


def carry(
    group: ExpertGroup, copies: CopyList, rows_ND: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Rows unchanged, and each part of the copies held here, [C, ...] in the order of slots."""
    rows_ND, *held = _Carry.apply(group, copies, rows_ND, *parts)  # type: ignore[no-untyped-call]
    return rows_ND, held


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, copies: CopyList, rows_ND: Tensor, *parts: Tensor) -> Any:  # noqa: ANN401
        ctx.group, ctx.copies = group, copies
        ctx.served = (copies.served_expert - group.rank * len(parts[0])).tolist()  # homes are in order and never move
        ctx.homes = [(part.shape, part.dtype) for part in parts]
        served = torch.tensor(ctx.served, dtype=torch.long, device=rows_ND.device)
        sent = [part.detach().index_select(0, served) for part in parts]
        return rows_ND.view_as(rows_ND), *exchange(group, copies, sent, home=False).wait()

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        if not any(ctx.needs_input_grad[3:]):  # experts are frozen, on every rank alike
            return None, None, grad_rows, *(None for _ in grads)
        received = exchange(ctx.group, ctx.copies, grads, home=True).wait()
        home = [
            _stacked(lines, shape, dtype, ctx.served) for lines, (shape, dtype) in zip(received, ctx.homes, strict=True)
        ]
        return None, None, grad_rows, *home


def _stacked(lines: Tensor, shape: torch.Size, dtype: torch.dtype, served: list[int]) -> Tensor | None:
    """Sums over copies as a gradient of all homes; None if no home was copied."""
    if not served:
        return None
    total = lines.new_zeros(shape, dtype=dtype)
    for slot, summed in sum_copies(lines, served).items():
        total[slot] = summed
    return total


class TransformersVisits(LayerVisits):
    """The armed visits of one layer, with the recorded experts."""

    def __init__(self, layer: int, group: ExpertGroup, experts: nn.Module, num_experts: int, spare_slots: int) -> None:
        super().__init__(layer, group, num_homes=num_experts // group.num_ranks, in_flight=False)
        self.experts, self.num_experts = experts, num_experts
        self.num_slots = self.num_homes + spare_slots
        self.recorded: Sequence[Tensor] = ()
        """[T, K] experts of each micro-batch, -1 where they are routed live"""

    def route(self, forward: Callable[..., Any], hidden: Tensor, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        """Begin a forward: run transformers' router so that it chooses the recorded experts."""
        self.current = self.take()
        if self.current is None:
            return forward(hidden, *more, **options)
        recorded_TK, num_tokens = self.recorded[self.number], hidden.numel() // hidden.shape[-1]
        if len(recorded_TK) != num_tokens:
            raise InputError(
                f"MoE layer {self.layer} got {num_tokens} tokens, {len(recorded_TK)} were given to begin() for this "
                "micro-batch: pass one row per token, in the same order, with -1 for padding"
            )
        return route_recorded(
            lambda: forward(hidden, *more, **options), recorded_TK.to(hidden.device), rows=None,
            num_experts=self.num_experts, layer=self.layer,
        )  # fmt: skip

    def run(self, run: Run, rows_ND: Tensor, slot_of_row: Tensor) -> Tensor:
        """Run homes and copies on rows. The module's parameters must be unsharded, those of its homes."""
        assert self.current is not None
        slots = self.current
        if not slots.flash.num_in_node:
            return run(rows_ND, slot_of_row)
        parts = dict(self.experts.named_parameters(recurse=False))
        rows_ND, copies = carry(self.group, slots.flash, rows_ND, list(parts.values()))
        if not (num_held := slots.flash.held_expert.size):
            return run(rows_ND, slot_of_row)
        of_copy = slot_of_row >= self.num_homes
        order = of_copy.argsort(stable=True)
        num = len(rows_ND) - int(of_copy.sum())
        rows_ND, slot_of_row = rows_ND.index_select(0, order), slot_of_row.index_select(0, order)
        results = run(rows_ND[:num], slot_of_row[:num])
        with _weights(self.experts, dict(zip(parts, copies, strict=True)), num_held):
            more = run(rows_ND[num:], slot_of_row[num:] - self.num_homes)
        return torch.cat([results, more]).index_select(0, order.argsort())


@contextmanager
def _weights(experts: Any, parts: dict[str, Tensor], num: int) -> Iterator[None]:  # noqa: ANN401
    """Swap in other experts' weights, the way transformers itself gives the module local tensors."""
    kept, kept_num = dict(experts._parameters), experts.num_experts  # noqa: SLF001
    experts._parameters.update(parts)  # noqa: SLF001
    experts.num_experts = num
    try:
        yield
    finally:
        experts._parameters.update(kept)  # noqa: SLF001
        experts.num_experts = kept_num


def to_slots(experts_TK: Tensor, slots: SlotTable) -> Tensor:
    """[T, K] the slot of each pair, among those of all ranks. Reads nothing from the device."""
    taken = np.flatnonzero(slots.end_of_slot > slots.first_of_slot)
    taken = taken[np.lexsort((slots.first_of_slot[taken], slots.expert_of_slot[taken]))]
    num_experts = int(slots.expert_of_slot.max()) + 1
    width = experts_TK.numel() + 1  # (expert, number of its pair) becomes expert * width + number
    first = np.minimum(slots.first_of_slot[taken], width - 1)
    key, slot_of_key = (
        torch.from_numpy(values).to(experts_TK.device)
        for values in (slots.expert_of_slot[taken] * width + first, taken)
    )
    experts = experts_TK.flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.long, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    begin = counts.cumsum(0) - counts
    ordered = experts.index_select(0, order)
    number = torch.arange(len(experts), device=experts.device) - begin.index_select(0, ordered)
    found = torch.searchsorted(key, ordered * width + number, right=True) - 1
    slot_of_pair = torch.empty_like(experts)
    slot_of_pair[order] = slot_of_key.index_select(0, found)
    return slot_of_pair.view_as(experts_TK)


def known_or_live(ids_TK: Tensor) -> Tensor:
    """Ids with -1 in the rows that `count_routing` skips: those with a negative id or a repeated expert."""
    ordered = ids_TK.sort(dim=1).values
    known = (ordered[:, 0] >= 0) & (ordered[:, 1:] != ordered[:, :-1]).all(dim=1)
    signed = ids_TK.to(torch.int16) if ids_TK.dtype is torch.uint8 else ids_TK
    return signed.masked_fill(~known[:, None], -1)
