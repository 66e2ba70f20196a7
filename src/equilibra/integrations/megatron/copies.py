"""Parameters of Megatron's experts by slot, and their copies: weights go out before forward, gradients return after.

    fetched = fetch(packing, slots, parameters)                              # starts, perhaps layers ahead
    rows, probs, copies = carry(fetched, rows, probs, parameters)            # waits

Rows and probabilities pass through `carry`'s autograd function. So every rank joins the exchange of gradients, even
with no copy of its own, and does so before it sends gradients of tokens. Experts are Megatron's `SequentialMLP` or
Transformer Engine's grouped ones.
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

NAMES = (re.compile(r"^local_experts\.(\d+)\.(.+)$"), re.compile(r"^(.+\.(?:weight|bias))(\d+)$"))


def slot_and_part(name: str) -> tuple[int, str]:
    """Slot and part in a parameter's name, such as `local_experts.3.linear_fc1.weight` or `linear_fc1.weight3`."""
    if found := NAMES[0].match(name):
        return int(found[1]), found[2]
    if found := NAMES[1].match(name):
        return int(found[2]), found[1]
    raise InputError(
        f"cannot tell which expert parameter {name} belongs to: experts must be SequentialMLP or TEGroupedMLP, with "
        "separate parameters per expert; switch moe_use_legacy_grouped_gemm off"
    )


def parts_of(experts: nn.Module) -> list[dict[str, nn.Parameter]]:
    """The parameters of each slot by part, in one order for all slots."""
    slots: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in experts.named_parameters():
        slot, part = slot_and_part(name)
        slots.setdefault(slot, {})[part] = parameter
    found = [dict(sorted(slots[slot].items())) for slot in sorted(slots)]
    if not found or any(
        {part: p.shape for part, p in one.items()} != {part: p.shape for part, p in found[0].items()} for one in found
    ):
        shapes = [{part: list(p.shape) for part, p in one.items()} for one in found]
        raise InputError(f"experts of a layer must have parameters of the same names and shapes, not {shapes}")
    return found


def run_copies(template: Any, copies: Sequence[Sequence[Tensor]], *arguments: Any) -> Tensor:  # noqa: ANN401
    """Run the template's experts with the weights of `copies`, slot by slot in the order of `parts_of`.

    Empty slots get no rows; the first copy stands in for their weights.
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
    """The wire format of a layer's experts: one row each, its parts concatenated."""

    group: ExpertGroup
    part_shapes: Sequence[torch.Size]
    """shapes of one expert's parts"""
    like: Tensor
    """any part, for dtype and device; needed even if this rank serves no copy"""
    fused: bool
    """whether kernels add weight gradients to main_grad and DDP ignores `grad`"""

    def pack(self, experts: Sequence[Sequence[Tensor]]) -> Tensor:
        """[experts, width] rows of experts, each given as its parts."""
        rows = self.like.new_empty(len(experts), sum(shape.numel() for shape in self.part_shapes))
        for row, parts in zip(rows, experts, strict=True):
            torch.cat([part.reshape(-1) for part in parts], out=row)
        return rows

    def unpack(self, row: Tensor) -> list[Tensor]:
        """The parts of an expert, as views of its row."""
        pieces = torch.split(row, [shape.numel() for shape in self.part_shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.part_shapes, strict=True)]


class Fetched(NamedTuple):
    """The copies of a visit in transit."""

    packing: Packing
    slots: SlotTable
    arriving: Arriving

    def wait(self) -> Tensor:
        """[held, width] rows of the copies, in the order of slots."""
        return self.arriving.wait()[0]


@torch.no_grad()
def fetch(packing: Packing, slots: SlotTable, parts: Sequence[dict[str, nn.Parameter]]) -> Fetched:
    """Collective: start to fetch the copies of a visit. Weights must not change between this and its forward.

    parts: the parameters of each home slot.
    """
    sent = packing.pack([[part.detach() for part in parts[slot].values()] for slot in slots.served])
    return Fetched(packing, slots, exchange(packing.group, slots.copies, [sent], home=False))


def carry(
    fetched: Fetched, rows: Tensor, probs: Tensor, parts: Sequence[dict[str, nn.Parameter]]
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Rows and probabilities unchanged, and the parts of each copy this rank holds, in the order of slots.

    parts: the parameters of each home slot, as given to `fetch`.
    """
    if torch.is_grad_enabled() and not (rows.requires_grad or probs.requires_grad):
        raise ExecuteError(
            f"gradients of copies of MoE layer {fetched.slots.copies.layer} would be lost on ranks that hold none: "
            "neither its input nor its router requires a gradient; train one of them, or set spare_slots=0"
        )
    parameters = [part for slot in sorted(set(fetched.slots.served)) for part in parts[slot].values()]
    rows, probs, *flat = _Carry.apply(fetched, rows, probs, *parameters)  # type: ignore[no-untyped-call]
    num = len(fetched.packing.part_shapes)
    return rows, probs, [list(flat[first : first + num]) for first in range(0, len(flat), num)]


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fetched: Fetched, rows: Tensor, probs: Tensor, *parameters: nn.Parameter) -> Any:  # noqa: ANN401
        ctx.packing, ctx.slots, ctx.parameters = fetched.packing, fetched.slots, parameters
        held = [part for row in fetched.wait() for part in fetched.packing.unpack(row)]
        return rows.view_as(rows), probs.view_as(probs), *held

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
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
    """The gradient for autograd; None if it was added to main_grad, as fused kernels do."""
    main_grad = getattr(parameter, "main_grad", None)
    if fused and main_grad is not None:
        main_grad.add_(total)
        return None
    return total.to(parameter.dtype) if parameter.requires_grad else None
