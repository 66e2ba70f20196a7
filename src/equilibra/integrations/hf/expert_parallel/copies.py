"""Copies of experts for one visit: weights come with the rows, gradients go home in backward.

    rows, copies = carry(group, slots, rows, parts)

Symbols: H homes, C copies that this rank holds, N rows. A part is the stacked parameter [H, ...] of a layer's homes.

The rows are threaded through the function, so that every rank takes part in the exchange of gradients, also one that
holds and serves no copy, and before any of them sends gradients of rows. Gradients leave as part of the stacked
parameter's gradient: FSDP reduces them with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibra.execute.group import ExpertGroup
from equilibra.integrations.executor.copies import exchange, sum_copies
from equilibra.integrations.planned.slots import SlotTable

__all__ = ["carry"]


def carry(
    group: ExpertGroup, slots: SlotTable, rows_ND: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Rows as they were, and for every part those of the copies [C, ...], in the order of slots."""
    rows_ND, *copies = _Carry.apply(group, slots, rows_ND, *parts)  # type: ignore[no-untyped-call]
    return rows_ND, copies


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, slots: SlotTable, rows_ND: Tensor, *parts: Tensor) -> Any:  # noqa: ANN401
        """Fetch the copies."""
        ctx.group, ctx.slots = group, slots
        ctx.homes = [(part.shape, part.dtype) for part in parts]
        served = torch.tensor(slots.served, dtype=torch.long, device=rows_ND.device)
        sent = [part.detach().index_select(0, served) for part in parts]
        return rows_ND.view_as(rows_ND), *exchange(group, slots.copies, sent, home=False).wait()

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        """Gradients of copies home."""
        if not any(ctx.needs_input_grad[3:]):  # the same on every rank: experts that do not learn
            return None, None, grad_rows, *(None for _ in grads)
        received = exchange(ctx.group, ctx.slots.copies, grads, home=True).wait()
        home = [
            _stacked(lines, shape, dtype, ctx.slots.served)
            for lines, (shape, dtype) in zip(received, ctx.homes, strict=True)
        ]
        return None, None, grad_rows, *home


def _stacked(lines: Tensor, shape: torch.Size, dtype: torch.dtype, served: list[int]) -> Tensor | None:
    """The sums over copies as a gradient of all homes; None: no copy."""
    if not served:
        return None
    total = lines.new_zeros(shape, dtype=dtype)
    for slot, summed in sum_copies(lines, served).items():
        total[slot] = summed
    return total
