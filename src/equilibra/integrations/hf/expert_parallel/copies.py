"""Copies of experts for one visit: weights come with the rows, gradients go home in backward.

    rows, *copies = carry(exchange, rows, *parts)

Symbols: H homes, C copies that this rank holds, N rows. A part is the stacked parameter [H, ...] of a layer's homes.

The rows are threaded through the function, so that every rank takes part in the exchange of gradients, also one that
holds and serves no copy, and before any of them sends gradients of rows. Gradients of one expert's copies are added in
the order of the ranks that hold them, and leave as part of the stacked parameter's gradient: FSDP reduces them with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibra.execute.group import Channel, ExpertGroup
from equilibra.integrations.planned.slots import SlotTable

__all__ = ["Exchange", "carry"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What is copied where."""

    group: ExpertGroup
    """its COPIES and GRADIENTS channels join the ranks of the plan"""
    visit: SlotTable
    """lines of copies"""
    layer: int
    """for messages"""

    def send(self, channel: Channel, parts: Sequence[Tensor], *, home: bool) -> list[Tensor]:
        """Lines of every part to the holders, or home: all parts are under way at once."""
        there, back = self.visit.copies.served_sizes, self.visit.copies.held_sizes
        sizes, received_sizes = (back, there) if home else (there, back)
        what = f"{'returning gradients of' if home else 'fetching'} copies of MoE layer {self.layer}"
        received = [part.new_empty(sum(received_sizes), *part.shape[1:]) for part in parts]
        pending = [
            self.group.all_to_all(channel, sent.contiguous(), sizes, into, received_sizes, what=what)
            for sent, into in zip(parts, received, strict=True)
        ]
        for one in pending:
            one.wait()
        return received


def carry(exchange: Exchange, rows_ND: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Rows as they were, and for every part those of the copies [C, ...], in the order of slots."""
    rows_ND, *copies = _Carry.apply(exchange, rows_ND, *parts)  # type: ignore[no-untyped-call]
    return rows_ND, copies


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, rows_ND: Tensor, *parts: Tensor) -> Any:  # noqa: ANN401
        """Fetch the copies."""
        ctx.exchange = exchange
        ctx.homes = [(part.shape[0], part.dtype) for part in parts]
        served = torch.tensor(exchange.visit.served, dtype=torch.long, device=rows_ND.device)
        held = exchange.send(Channel.COPIES, [part.detach().index_select(0, served) for part in parts], home=False)
        return rows_ND.view_as(rows_ND), *held

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        """Gradients of copies home."""
        exchange: Exchange = ctx.exchange
        if not any(ctx.needs_input_grad[2:]):  # the same on every rank: experts that do not learn
            return None, grad_rows, *(None for _ in grads)
        received = exchange.send(Channel.GRADIENTS, grads, home=True)
        return None, grad_rows, *map(_stacked, received, ctx.homes, [exchange.visit.served] * len(received))


def _stacked(lines: Tensor, home: tuple[int, torch.dtype], served: list[int]) -> Tensor | None:
    """The sums over copies as a gradient of all homes, in the order of holders, in at least float32; None: no copy."""
    if not served:
        return None
    num_homes, dtype = home
    wide = torch.promote_types(dtype, torch.float32)
    total = lines.new_zeros(num_homes, *lines.shape[1:], dtype=wide)
    for line, slot in zip(lines, served, strict=True):
        total[slot] += line
    return total.to(dtype)
