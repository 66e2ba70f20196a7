"""Copies of experts for one visit: weights come before the tokens or with them, gradients go home in backward.

    arriving = fetch(exchange, parameters)                                   # starts, may be layers ahead
    rows, probs, copies = carry(arriving, rows, probs, parameters)           # waits

The token tensor and the probabilities are threaded through the function, so that every rank takes part in the exchange
of gradients, also one that holds and serves no copy, and before any of them sends gradients of tokens. Gradients of one
expert's copies are added in the order of the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError
from equilibra.execute.group import Channel, ExpertGroup, Pending
from equilibra.integrations.planned.slots import SlotTable

__all__ = ["Arriving", "Exchange", "carry", "fetch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What is copied where."""

    group: ExpertGroup
    """its COPIES and GRADIENTS channels join the ranks of the plan"""
    visit: SlotTable
    """lines of copies"""
    layer: int
    """for messages"""
    part_shapes: Sequence[torch.Size]
    """of one expert"""
    dtype: torch.dtype
    """of its weights: ranks that serve none must know it too"""
    device: torch.device
    """of its weights"""
    fused: bool
    """whether weight gradients are added to main_grad by kernels, and `grad` is not looked at"""
    served_slots: list[int]
    """home slots whose parameters are given, each once"""

    @property
    def width(self) -> int:
        """Numbers of one expert."""
        return sum(shape.numel() for shape in self.part_shapes)

    def start(self, channel: Channel, sent: Tensor, *, home: bool) -> Arriving:
        """Rows [lines, width] to the holders, or home."""
        there, back = self.visit.copies.served_sizes, self.visit.copies.held_sizes
        sizes, received_sizes = (back, there) if home else (there, back)
        received = sent.new_empty(sum(received_sizes), self.width)
        what = f"{'returning gradients of' if home else 'fetching'} copies of MoE layer {self.layer}"
        pending = self.group.all_to_all(
            channel, sent.view(-1), [n * self.width for n in sizes], received.view(-1),
            [n * self.width for n in received_sizes], what=what,
        )  # fmt: skip
        return Arriving(exchange=self, rows=received, pending=pending)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arriving:
    """Rows of an exchange that are on their way."""

    exchange: Exchange
    rows: Tensor
    """[lines, width], once it is waited for"""
    pending: Pending

    def wait(self) -> Tensor:
        """The rows."""
        self.pending.wait()
        return self.rows


@torch.no_grad()
def fetch(exchange: Exchange, parameters: Sequence[nn.Parameter]) -> Arriving:
    """Collective: start to bring the copies of a visit, with the weights of now: they must be those of its forward.

    parameters: of `served_slots`, part by part.
    """
    parts = len(exchange.part_shapes)
    of_slot = {slot: parameters[i * parts : (i + 1) * parts] for i, slot in enumerate(exchange.served_slots)}
    sent = torch.empty(len(exchange.visit.served), exchange.width, dtype=exchange.dtype, device=exchange.device)
    for line, slot in zip(sent, exchange.visit.served, strict=True):
        torch.cat([part.detach().reshape(-1) for part in of_slot[slot]], out=line)
    return exchange.start(Channel.COPIES, sent, home=False)


def carry(
    arriving: Arriving, rows: Tensor, probs: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Rows and probabilities as they were, and the parts of every copy that this rank holds, in the order of slots.

    parameters: those that were fetched.
    """
    exchange = arriving.exchange
    if torch.is_grad_enabled() and not (rows.requires_grad or probs.requires_grad):
        raise ExecuteError(
            f"gradients of copies of MoE layer {exchange.layer} would be lost on ranks that hold none: neither its "
            "input nor its router learns; train one of them, or balance without copies (spare_slots=0)"
        )
    rows, probs, *flat = _Carry.apply(arriving, rows, probs, *parameters)  # type: ignore[no-untyped-call]
    parts = len(exchange.part_shapes)
    return rows, probs, [list(flat[first : first + parts]) for first in range(0, len(flat), parts)]


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Arriving, rows: Tensor, probs: Tensor, *parameters: nn.Parameter) -> Any:  # noqa: ANN401
        """Wait for the copies."""
        ctx.exchange, ctx.parameters = arriving.exchange, parameters
        held = [part for line in arriving.wait() for part in _split(line, arriving.exchange.part_shapes)]
        return rows.view_as(rows), probs.view_as(probs), *held

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        """Gradients of copies home."""
        exchange: Exchange = ctx.exchange
        parts, held = len(exchange.part_shapes), exchange.visit.num_held
        sent = torch.empty(held, exchange.width, dtype=exchange.dtype, device=exchange.device)
        for number, line in enumerate(sent):
            torch.cat([grad.reshape(-1) for grad in grads[number * parts : (number + 1) * parts]], out=line)
        received = exchange.start(Channel.GRADIENTS, sent, home=True).wait()
        totals = _sums(received, exchange)
        home = [
            _give(parameter, total, fused=exchange.fused)
            for parameter, total in zip(ctx.parameters, totals, strict=True)
        ]
        return None, grad_rows, grad_probs, *home


def _sums(received: Tensor, exchange: Exchange) -> list[Tensor]:
    """For every given parameter the sum over its copies, in the order of holders, in at least float32."""
    wide = torch.promote_types(received.dtype, torch.float32)
    total_of_slot = {slot: received.new_zeros(exchange.width, dtype=wide) for slot in exchange.served_slots}
    for line, slot in zip(received, exchange.visit.served, strict=True):
        total_of_slot[slot] += line
    return [part for slot in exchange.served_slots for part in _split(total_of_slot[slot], exchange.part_shapes)]


def _give(parameter: nn.Parameter, total: Tensor, *, fused: bool) -> Tensor | None:
    """The gradient for autograd; where kernels add to main_grad, it is added there and DDP ignores `grad`."""
    main_grad = getattr(parameter, "main_grad", None)
    if fused and main_grad is not None:
        main_grad.add_(total)
        return None
    return total.to(parameter.dtype) if parameter.requires_grad else None


def _split(line: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = torch.split(line, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
