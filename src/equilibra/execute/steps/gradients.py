"""Gradients over all ranks: sums of dense ones, a norm that counts every parameter once, and replica checks.

Every rank holds the dense parameters (or, under FSDP, a shard of them) and its home experts. The squared norm sums what
each rank holds, divided by the number of ranks that hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from equilibra.core.errors import ExecuteError, InputError, MismatchError, NonFiniteError
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.checkpoint_state import nonfinite
from equilibra.execute.steps.masters import LOW

# --- equal dense weights ---
# Ranks seeded differently, or loaded from different files, train different models without any collective failing.
# So ranks compare hashes of their dense weights, computed on the device.

CHUNK = 4 << 20
"""values widened to int64 at a time"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STEP, FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""odd: positions and values are spread over all bits"""


@torch.no_grad()
def check_replicated(module: nn.Module, runtime: Runtime) -> None:
    """Collective: MismatchError unless dense parameters and persistent buffers (no DTensors) are equal to the bit."""
    group = runtime.group
    if group.world_size == 1:
        return
    named = dict(_replicated(module, runtime))
    hashes = _hashes(list(named.values()))
    about = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()]
    digest = sha256("\n".join(about).encode() + hashes.tobytes()).digest()
    said = group.gather(np.frombuffer(digest, np.uint8), what="comparing dense weights")
    if all(part.tobytes() == said[0].tobytes() for part in said):
        return
    shapes = np.array([np.frombuffer(sha256(text.encode()).digest()[:8], np.int64)[0] for text in about], np.int64)
    every = group.gather(np.stack([shapes, hashes], axis=1), what="looking for the dense weight that differs")
    _raise_first(list(named), [np.asarray(part) for part in every])


def _raise_first(names: list[str], every: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> None:
    advice = "seed every rank alike or load the same checkpoint on all of them before training"
    if any(len(part) != len(names) or (part[:, 0] != every[0][:, 0]).any() for part in every):
        raise MismatchError(
            "ranks have different dense parameters or buffers (names, shapes or types; counts by rank: "
            f"{', '.join(str(len(part)) for part in every)}): build the same model on every rank"
        )
    hashes_RN = np.stack([part[:, 1] for part in every])
    first = int((hashes_RN != hashes_RN[0]).any(axis=0).argmax())
    others = np.flatnonzero(hashes_RN[:, first] != hashes_RN[0, first]).tolist()
    count = int((hashes_RN != hashes_RN[0]).any(axis=0).sum())
    raise MismatchError(
        f"the dense weight {names[first]} is not the same on all ranks: {_ranks(others)} from rank 0 "
        f"({count} of {len(names)} tensors differ). Dense weights must be equal to the bit; {advice}"
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank {shown} differs" if len(numbers) == 1 else f"ranks {shown}{more} differ"


def _replicated(module: nn.Module, runtime: Runtime) -> Iterator[tuple[str, Tensor]]:
    """Dense parameters and persistent buffers; other buffers may be per-rank caches."""
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    for prefix, part in module.named_modules():
        if isinstance(part, ExpertWeights):
            continue
        own: dict[str, Tensor | None] = dict(part.named_parameters(recurse=False))
        own |= {n: b for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set}  # noqa: SLF001
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in experts and not is_sharded(tensor):
                yield f"{prefix}.{name}" if prefix else name, tensor


def _hashes(tensors: list[Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    if not tensors:
        return np.zeros(0, np.int64)
    found = [_hash(tensor.detach()) for tensor in tensors]
    return torch.stack([one.to(found[0].device) for one in found]).cpu().numpy()


def _hash(tensor: Tensor) -> Tensor:
    """Sum modulo 2^64 of words mixed with their positions: a single flipped bit changes it."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(WORDS[real.dtype.itemsize]).view(-1)
    for first in range(0, words.numel(), CHUNK):
        mixed = words[first : first + CHUNK].to(torch.int64)
        mixed = (mixed + torch.arange(first, first + mixed.numel(), device=tensor.device) * STEP) * FACTOR
        total += ((mixed ^ (mixed >> 31)) * STEP).sum()
    return total


BUCKET_VALUES = 4 << 20
MOST_NAMES = 5


def dense_parameters(module: nn.Module, runtime: Runtime) -> list[nn.Parameter]:
    """Parameters that every rank holds: all but those of experts."""
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    return [parameter for parameter in module.parameters() if id(parameter) not in experts]


def gradient_of(parameter: nn.Parameter, runtime: Runtime) -> Tensor | None:
    """The gradient of a parameter or, after `finish_gradients`, of its master."""
    if parameter.grad is not None:
        return parameter.grad
    master = runtime.masters.get(parameter)
    return None if master is None else master.grad


# --- sums ---


@torch.no_grad()
def sum_dense_gradients(parameters: Iterable[nn.Parameter], group: ExpertGroup) -> None:
    """Sum dense gradients over all ranks in buckets, in at least float32.

    A missing gradient counts as zero; a parameter that no rank used keeps none, so the optimizer skips it.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    if any(is_sharded(parameter) for parameter in learning):
        raise InputError(
            "cannot sum gradients of sharded parameters (DTensor): whatever shards them does; call finish_gradients() "
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
    """Collective: the norm over all parameters, equal to the bit on every rank; not finite if any gradient is not.

    Dense gradients must be summed over ranks already; they may be DTensors, as FSDP leaves them.
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
    """Squared norm of this rank's part of a dense gradient, divided by the number of ranks that hold the same."""
    if not is_sharded(gradient):
        return _norm(gradient).square() / world_size
    placements, mesh = gradient.placements, gradient.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise InputError("cannot take the norm of a dense gradient that is a DTensor of partial sums: reduce it first")
    num_shards: int = prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    local: Tensor = gradient.to_local()
    return _norm(local).square() * (num_shards / world_size)


def nonfinite_gradients(module: nn.Module, runtime: Runtime) -> list[str]:
    """Collective: up to MOST_NAMES parameters whose gradients hold NaN or infinities, with experts and ranks."""
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
    said = runtime.group.gather_text("\n".join(own[:MOST_NAMES]), what="naming gradients that are not finite")
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(said):
        for name in text.splitlines():
            ranks.setdefault(name, []).append(str(rank))
    return [f"{n} (rank{'s' * (len(r) > 1)} {', '.join(r[:MOST_NAMES])})" for n, r in ranks.items()][:MOST_NAMES]


@torch.no_grad()
def clip_gradients(
    module: nn.Module, runtime: Runtime, max_norm: float, *, error_if_nonfinite: bool = True
) -> float:  # fmt: skip
    """Collective: scale gradients to a norm of at most `max_norm`; returns the norm before scaling.

    If any gradient is NaN or infinite, every rank raises NonFiniteError with the parameters' names or, without
    `error_if_nonfinite`, gets the non-finite norm. Gradients are unchanged then; do not step on them.
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
    """Raise InputError if FSDP shards experts: it would gather shards of different experts into one."""
    for layer, weights in enumerate(runtime.weights):
        if any(is_sharded(part) for part in weights.parts()):
            raise InputError(
                f"the experts of MoE layer {layer} are sharded (DTensor), as if all ranks held the same ones: leave "
                f"them out, {RECIPE}"
            )


def sharded_and_summed(module: nn.Module) -> bool:
    """Whether FSDP2 shards the module's dense parameters; InputError if it averages gradients instead of summing."""
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
