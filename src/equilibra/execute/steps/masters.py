"""Masters: float32 weights beside weights of low precision, for the optimizer to work on.

    masters = float32_masters(model)
    optimizer = torch.optim.AdamW(masters_or_parameters(model, masters))
    balancer = Balancer(runtime, setting, optimizer=optimizer, masters=masters)

Gradients of a parameter with a master are accumulated in float32. `Balancer.finish_gradients` hands them to the
masters, where the optimizer, clipping and a GradScaler find them; after an optimizer's step the balancer writes
the weights. Masters and their moments move with homes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = [
    "LOW", "accumulate_in_masters_type", "float32_masters", "hand_over_gradients", "masters_or_parameters",
    "write_weights",
]  # fmt: skip

LOW = (torch.bfloat16, torch.float16)


def float32_masters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """A float32 copy of every parameter that learns and has low precision."""
    return {
        parameter: nn.Parameter(parameter.detach().float())
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.dtype in LOW
    }


def masters_or_parameters(module: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> list[nn.Parameter]:
    """What the optimizer gets: the master of each parameter, or the parameter itself."""
    return [masters.get(parameter, parameter) for parameter in module.parameters() if parameter.requires_grad]


def accumulate_in_masters_type(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let autograd add up the gradients of parameters in the type of their masters: many micro-batches are summed."""
    for parameter, master in masters.items():
        if parameter.is_leaf and parameter.grad_dtype != master.dtype:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = master.dtype
            parameter.grad = None if gradient is None else gradient.to(master.dtype)


@torch.no_grad()
def hand_over_gradients(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gradients of the weights become those of the masters, without a copy where they have their type."""
    for parameter, master in masters.items():
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        parameter.grad = None


@torch.no_grad()
def write_weights(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """The weights are the masters, rounded."""
    for parameter, master in masters.items():
        parameter.copy_(master)
