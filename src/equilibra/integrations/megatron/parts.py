"""Parameters of Megatron's experts by home slot: those of `SequentialMLP` and Transformer Engine's grouped experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError

__all__ = ["parts_of", "run_copies", "slot_and_part"]

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
