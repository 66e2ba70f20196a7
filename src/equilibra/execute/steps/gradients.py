"""Gradients over all ranks: sums of dense ones, and a norm that sees every expert once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.runtime import Runtime

__all__ = ["clip_gradients", "dense_parameters", "gradient_norm", "sum_dense_gradients"]

BUCKET_VALUES = 4 << 20


def dense_parameters(module: nn.Module, runtime: Runtime) -> list[nn.Parameter]:
    """The parameters that every rank has: all but those of experts at home."""
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    return [parameter for parameter in module.parameters() if id(parameter) not in experts]


@torch.no_grad()
def sum_dense_gradients(parameters: Iterable[nn.Parameter], group: ExpertGroup) -> None:
    """Sum gradients of dense parameters over all ranks, a few megabytes at a time; a missing one counts as zero."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "full_tensor"):
            raise InputError(
                "gradients of sharded parameters (DTensor) are summed by whatever shards them: call finish_gradients() "
                "without the module"
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.grad.dtype or sum(g.numel() for g in bucket) > BUCKET_VALUES):
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(gradients: list[Tensor], group: ExpertGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    group.sum(Channel.DENSE, flat, what="summing dense gradients").wait()
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def gradient_norm(module: nn.Module, runtime: Runtime) -> float:
    """The norm over all parameters of the model; every rank gets the same number, to the bit."""
    dense = sum((_squared(parameter.grad) for parameter in dense_parameters(module, runtime)), 0.0)
    experts = sum((_squared(part.grad) for weights in runtime.weights for part in weights.parts()), 0.0)
    group = runtime.group
    said = group.gather(np.array([experts], np.float64), what="summing the norm of experts' gradients")
    first = group.index * group.num_ranks
    total = dense + sum(float(part[0]) for part in said[first : first + group.num_ranks])
    return float(np.sqrt(total))


def _squared(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2)


@torch.no_grad()
def clip_gradients(module: nn.Module, runtime: Runtime, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before."""
    if runtime.gradients_under_way:
        raise ExecuteError("gradients of copies have not returned: call balancer.finish_gradients() before clipping")
    norm = gradient_norm(module, runtime)
    scale = min(1.0, max_norm / (norm + 1e-6))
    if scale < 1.0:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm
