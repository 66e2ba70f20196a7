"""Gradients over all ranks: sums of dense ones, and a norm that sees every parameter once.

Every rank holds the dense parameters (or, under FSDP, a shard of them) and the experts at home on it. The squared norm
is the sum over ranks of the squares of what a rank holds, each divided by the number of ranks that hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from equilibra.core.errors import ExecuteError, InputError, NonFiniteError
from equilibra.execute.finite import nonfinite
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.masters import LOW

__all__ = [
    "check_experts_are_whole",
    "clip_gradients",
    "dense_parameters",
    "gradient_norm",
    "gradient_of",
    "is_sharded",
    "nonfinite_gradients",
    "sharded_and_summed",
    "sum_dense_gradients",
]

BUCKET_VALUES = 4 << 20
MOST_NAMES = 5


def dense_parameters(module: nn.Module, runtime: Runtime) -> list[nn.Parameter]:
    """The parameters that every rank has: all but those of experts at home."""
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    return [parameter for parameter in module.parameters() if id(parameter) not in experts]


def gradient_of(parameter: nn.Parameter, runtime: Runtime) -> Tensor | None:
    """The gradient of a parameter; once `finish_gradients` was called it is that of its master, if it has one."""
    if parameter.grad is not None:
        return parameter.grad
    master = runtime.masters.get(parameter)
    return None if master is None else master.grad


# --- sums ---


@torch.no_grad()
def sum_dense_gradients(parameters: Iterable[nn.Parameter], group: ExpertGroup) -> None:
    """Sum gradients of dense parameters over all ranks, a few megabytes at a time, in float32 or more.

    A gradient that some ranks lack counts as zero there. A parameter that no rank used keeps none, so that an optimizer
    leaves it alone.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    if any(is_sharded(parameter) for parameter in learning):
        raise InputError(
            "gradients of sharded parameters (DTensor) are summed by whatever shards them: call finish_gradients() "
            "without the module"
        )
    used = torch.tensor([parameter.grad is not None for parameter in learning], dtype=torch.int32)
    group.sum(Channel.CONTROL, used, what="comparing which dense parameters have gradients").wait()
    bucket: list[Tensor] = []
    for parameter, num_ranks in zip(learning, used.tolist(), strict=True):
        if not num_ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if bucket and (bucket[0].dtype != parameter.grad.dtype or sum(g.numel() for g in bucket) > BUCKET_VALUES):
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(gradients: list[Tensor], group: ExpertGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if flat.dtype in LOW:
        flat = flat.float()
    group.sum(Channel.DENSE, flat, what="summing dense gradients").wait()
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")


# --- norms ---


@torch.no_grad()
def gradient_norm(module: nn.Module, runtime: Runtime) -> float:
    """Collective: the norm over all parameters of the model; every rank gets the same number, to the bit.

    Dense gradients are summed over ranks already; they may be DTensors, as FSDP leaves them. Not finite if the gradient
    of any rank is not.
    """
    group = runtime.group
    of_expert = group.num_ranks / group.world_size
    squares = [
        _squared(gradient, group.world_size) for parameter in dense_parameters(module, runtime)
        if (gradient := gradient_of(parameter, runtime)) is not None
    ] + [
        _norm(gradient).square() * of_expert for weights in runtime.weights for part in weights.parts()
        if (gradient := gradient_of(part, runtime)) is not None
    ]  # fmt: skip
    own = float(torch.stack([one.to(squares[0].device) for one in squares]).sum()) if squares else 0.0
    said = group.gather(np.array([own], np.float64), what="summing the norm of gradients")
    return float(np.sqrt(sum(float(part[0]) for part in said)))


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def _squared(gradient: Any, world_size: int) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """The square of what this rank holds of a dense gradient, over the number of ranks that hold the same."""
    if not is_sharded(gradient):
        return _norm(gradient).square() / world_size
    placements, mesh = gradient.placements, gradient.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise InputError("a dense gradient is a DTensor of partial sums: reduce it before its norm is asked for")
    num_shards: int = prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    local: Tensor = gradient.to_local()
    return _norm(local).square() * (num_shards / world_size)


def nonfinite_gradients(module: nn.Module, runtime: Runtime) -> list[str]:
    """Collective: the first parameters whose gradients hold NaN or infinities, with experts and ranks; some of many."""
    experts = {id(part): weights.experts for weights in runtime.weights for part in weights.parts()}
    named = [(n, p, gradient_of(p, runtime)) for n, p in module.named_parameters()]
    there = [(name, parameter, gradient) for name, parameter, gradient in named if gradient is not None]
    own = []
    for (name, parameter, gradient), bad in zip(there, nonfinite([g for *_, g in there]), strict=True):
        if bad and id(parameter) in experts:
            rows = nonfinite(list(gradient.unbind(0)))
            numbers = [str(e) for e, row in zip(experts[id(parameter)].tolist(), rows, strict=True) if row]
            own.append(f"{name} of expert{'s' * (len(numbers) > 1)} {', '.join(numbers[:MOST_NAMES])}")
        elif bad:
            own.append(name)
    text = "\n".join(own[:MOST_NAMES]).encode()
    said = runtime.group.gather(np.frombuffer(text, np.uint8), what="naming gradients that are not finite")
    ranks: dict[str, list[str]] = {}
    for rank, part in enumerate(said):
        for name in part.tobytes().decode().splitlines():
            ranks.setdefault(name, []).append(str(rank))
    return [f"{n} (rank{'s' * (len(r) > 1)} {', '.join(r[:MOST_NAMES])})" for n, r in ranks.items()][:MOST_NAMES]


@torch.no_grad()
def clip_gradients(
    module: nn.Module, runtime: Runtime, max_norm: float, *, error_if_nonfinite: bool = True
) -> float:  # fmt: skip
    """Collective: scale all gradients so that their norm is at most `max_norm`; returns the norm before.

    If a gradient is NaN or infinite on any rank, every rank gets a NonFiniteError that names the parameters or, without
    `error_if_nonfinite`, the norm, which is not finite; gradients stay as they are. Do not step on them.
    """
    if runtime.gradients_under_way:
        raise ExecuteError("gradients of copies have not returned: call balancer.finish_gradients() before clipping")
    norm = gradient_norm(module, runtime)
    if not isfinite(norm):
        if error_if_nonfinite:
            raise NonFiniteError(
                f"the norm of the gradient is {norm}: NaN or infinite gradients of "
                f"{'; '.join(nonfinite_gradients(module, runtime)) or 'no parameter of the module given'}. No gradient "
                "was changed; skip this optimizer step (balancer.discard_gradients) or stop"
            )
        return norm
    scale = min(1.0, max_norm / (norm + 1e-6))
    if scale < 1.0:
        for parameter in module.parameters():
            gradient = gradient_of(parameter, runtime)
            if gradient is not None:
                gradient.mul_(scale)
    return norm


RECIPE = (
    "fully_shard(part, mesh=mesh, ignored_params=experts), then part.set_gradient_divide_factor(1.0) and "
    "part.set_force_sum_reduction_for_comms(True) for every FSDPModule; see docs/runtime.md"
)


def check_experts_are_whole(runtime: Runtime) -> None:
    """An error if FSDP shards experts: shards of different experts would be gathered into one."""
    for layer, weights in enumerate(runtime.weights):
        if any(hasattr(part, "full_tensor") for part in weights.parts()):
            raise InputError(
                f"the experts of MoE layer {layer} are sharded (DTensor), as if all ranks had the same ones: leave "
                f"them out, {RECIPE}"
            )


def sharded_and_summed(module: nn.Module) -> bool:
    """Whether FSDP2 shards the module's dense parameters; an error if it averages their gradients.

    FSDP2 averages over its ranks unless told otherwise; here a rank's loss is its share, and gradients are summed.
    """
    parts: list[tuple[str, Any]] = [(n, part) for n, part in module.named_modules() if isinstance(part, FSDPModule)]
    for name, part in parts:
        state = part._get_fsdp_state()  # noqa: SLF001 - torch has a setter and no getter
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            factor = getattr(group, "gradient_divide_factor", 1.0)  # no parameters of its own: nothing to sum
            if factor != 1.0:
                raise InputError(
                    f"FSDP divides the gradients of {name or 'the model'} by {factor or 'the number of its ranks'}: a "
                    f"rank's loss is its share of the whole loss, so they must be summed like those of experts. Use "
                    f"{RECIPE}"
                )
    return bool(parts)
