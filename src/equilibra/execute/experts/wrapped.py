"""Wrappers that take every parameter for a replicated one are refused where they are built.

DistributedDataParallel sends rank 0's parameters to all ranks when it is built, and averages gradients by position:
rank 1's experts would become rank 0's, and gradients of different experts be mixed. FullyShardedDataParallel (FSDP1)
cuts flat buffers over ranks as if they held the same. No collective fails, so the error must come before.
"""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from equilibra.core.errors import InputError
from equilibra.execute.experts.weights import ExpertWeights

__all__ = ["refuse_wrappers"]

WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


@cache
def refuse_wrappers() -> None:
    """From now on building such a wrapper around experts is an error, before it sends anything."""
    register_module_module_registration_hook(_refuse)


def _refuse(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    if isinstance(parent, WRAPPERS) and child is not None:
        if not any(isinstance(part, ExpertWeights) for part in child.modules()):
            return
        raise InputError(
            f"{type(parent).__name__} takes the experts of every rank for copies of the same parameters: it would "
            "overwrite them with rank 0's and mix the gradients of different experts. Leave the model unwrapped and "
            "call balancer.finish_gradients(model), which sums dense gradients over all ranks; to shard dense "
            "parameters use fully_shard (FSDP2), see docs/runtime.md"
        )
