"""Copies of experts for one visit: weights come before the tokens or with them, gradients go home in backward.

    fetched = fetch(packing, slots, parameters)                              # starts, may be layers ahead
    rows, probs, copies = carry(fetched, rows, probs, parameters)            # waits

The token tensor and the probabilities are threaded through the function, so that every rank takes part in the exchange
of gradients, also one that holds and serves no copy, and before any of them sends gradients of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.executor.visits import Arriving, exchange, sum_copies
from equilibra.integrations.planned import SlotTable

__all__ = ["Fetched", "Packing", "carry", "fetch", "parts_of", "run_copies", "slot_and_part"]

# Parameters of Megatron's experts by home slot: those of `SequentialMLP` and Transformer Engine's grouped experts.


NAMES = (re.compile(r"^local_experts\.(\d+)\.(.+)$"), re.compile(r"^(.+\.(?:weight|bias))(\d+)$"))


def slot_and_part(name: str) -> tuple[int, str]:
    """The slot and the rest of a parameter's name: `local_experts.3.linear_fc1.weight`, `linear_fc1.weight3`."""
    if found := NAMES[0].match(name):
        return int(found[1]), found[2]
    if found := NAMES[1].match(name):
        return int(found[2]), found[1]
    raise InputError(
        f"cannot tell which expert {name} is of: experts must be SequentialMLP or TEGroupedMLP, which have "
        "parameters of their own for every expert (moe_use_legacy_grouped_gemm keeps them in one)"
    )


def parts_of(experts: nn.Module) -> list[dict[str, nn.Parameter]]:
    """For every slot its parameters by part, in the same order."""
    slots: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in experts.named_parameters():
        slot, part = slot_and_part(name)
        slots.setdefault(slot, {})[part] = parameter
    found = [dict(sorted(slots[slot].items())) for slot in sorted(slots)]
    if not found or any(
        {part: p.shape for part, p in one.items()} != {part: p.shape for part, p in found[0].items()} for one in found
    ):
        raise InputError("experts of a layer must have parameters, and the same ones")
    return found


def run_copies(template: Any, copies: Sequence[Sequence[Tensor]], *arguments: Any) -> Tensor:  # noqa: ANN401
    """Experts of the template's class with these weights: slot by slot, in the order of `parts_of`.

    Slots without a copy get no rows; the first copy stands in for their weights.
    """
    weights = {}
    order = sorted({slot_and_part(name)[1] for name, _ in template.named_parameters()})
    for name, _ in template.named_parameters():
        slot, part = slot_and_part(name)
        weight = (copies[slot] if slot < len(copies) else copies[0])[order.index(part)]
        weights[name] = weight if slot < len(copies) else weight.detach()
    out, _ = torch.func.functional_call(template, weights, arguments)
    return out  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """How experts of a layer travel: a row each, its parts one after another."""

    group: ExpertGroup
    """its COPIES and GRADIENTS channels join the ranks of the plan"""
    part_shapes: Sequence[torch.Size]
    """of one expert"""
    like: Tensor
    """a part: ranks that serve no copy must know type and device too"""
    fused: bool
    """whether weight gradients are added to main_grad by kernels, and `grad` is not looked at"""

    def pack(self, experts: Sequence[Sequence[Tensor]]) -> Tensor:
        """[experts, width] rows of experts, each given as its parts."""
        rows = self.like.new_empty(len(experts), sum(shape.numel() for shape in self.part_shapes))
        for row, parts in zip(rows, experts, strict=True):
            torch.cat([part.reshape(-1) for part in parts], out=row)
        return rows

    def unpack(self, row: Tensor) -> list[Tensor]:
        """The parts of an expert: views."""
        pieces = torch.split(row, [shape.numel() for shape in self.part_shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.part_shapes, strict=True)]


class Fetched(NamedTuple):
    """Copies of a visit on their way."""

    packing: Packing
    slots: SlotTable
    arriving: Arriving

    def wait(self) -> Tensor:
        """[held, width] their rows, in the order of slots."""
        return self.arriving.wait()[0]


@torch.no_grad()
def fetch(packing: Packing, slots: SlotTable, parts: Sequence[dict[str, nn.Parameter]]) -> Fetched:
    """Collective: start to bring the copies of a visit, with the weights of now: they must be those of its forward.

    parts: of every home slot.
    """
    sent = packing.pack([[part.detach() for part in parts[slot].values()] for slot in slots.served])
    return Fetched(packing, slots, exchange(packing.group, slots.copies, [sent], home=False))


def carry(
    fetched: Fetched, rows: Tensor, probs: Tensor, parts: Sequence[dict[str, nn.Parameter]]
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Rows and probabilities as they were, and the parts of every copy that this rank holds, in the order of slots.

    parts: of every home slot, those that were fetched.
    """
    if torch.is_grad_enabled() and not (rows.requires_grad or probs.requires_grad):
        raise ExecuteError(
            f"gradients of copies of MoE layer {fetched.slots.copies.layer} would be lost on ranks that hold none: "
            "neither its input nor its router learns; train one of them, or balance without copies (spare_slots=0)"
        )
    parameters = [part for slot in sorted(set(fetched.slots.served)) for part in parts[slot].values()]
    rows, probs, *flat = _Carry.apply(fetched, rows, probs, *parameters)  # type: ignore[no-untyped-call]
    num = len(fetched.packing.part_shapes)
    return rows, probs, [list(flat[first : first + num]) for first in range(0, len(flat), num)]


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fetched: Fetched, rows: Tensor, probs: Tensor, *parameters: nn.Parameter) -> Any:  # noqa: ANN401
        """Wait for the copies."""
        ctx.packing, ctx.slots, ctx.parameters = fetched.packing, fetched.slots, parameters
        held = [part for row in fetched.wait() for part in fetched.packing.unpack(row)]
        return rows.view_as(rows), probs.view_as(probs), *held

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        """Gradients of copies home."""
        packing: Packing = ctx.packing
        num = len(packing.part_shapes)
        sent = packing.pack([grads[first : first + num] for first in range(0, len(grads), num)])
        (received,) = exchange(packing.group, ctx.slots.copies, [sent], home=True).wait()
        totals = [part for row in sum_copies(received, ctx.slots.served).values() for part in packing.unpack(row)]
        home = [
            _give(parameter, total, fused=packing.fused)
            for parameter, total in zip(ctx.parameters, totals, strict=True)
        ]
        return None, grad_rows, grad_probs, *home


def _give(parameter: nn.Parameter, total: Tensor, *, fused: bool) -> Tensor | None:
    """The gradient for autograd; where kernels add to main_grad, it is added there and DDP ignores `grad`."""
    main_grad = getattr(parameter, "main_grad", None)
    if fused and main_grad is not None:
        main_grad.add_(total)
        return None
    return total.to(parameter.dtype) if parameter.requires_grad else None
