"""Masters: weights in float32 beside weights of fewer digits, for the optimizer to work on.

    masters = float32_masters(model)
    optimizer = torch.optim.AdamW(masters_or_parameters(model, masters))
    balancer = Balancer(runtime, setting, optimizer=optimizer, masters=masters)

The balancer hands gradients to the masters before the optimizer's step and writes the weights after it; masters and
their moments move with homes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["float32_masters", "hand_over_gradients", "masters_or_parameters", "write_weights"]

LOW = (torch.bfloat16, torch.float16)


def float32_masters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """A float32 copy of every parameter that learns and has fewer digits."""
    return {
        parameter: nn.Parameter(parameter.detach().float())
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.dtype in LOW
    }


def masters_or_parameters(module: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> list[nn.Parameter]:
    """What the optimizer gets: the master of each parameter, or the parameter itself."""
    return [masters.get(parameter, parameter) for parameter in module.parameters() if parameter.requires_grad]


@torch.no_grad()
def hand_over_gradients(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gradients of the weights become those of the masters."""
    for parameter, master in masters.items():
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        parameter.grad = None


@torch.no_grad()
def write_weights(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """The weights are the masters, rounded."""
    for parameter, master in masters.items():
        parameter.copy_(master)
