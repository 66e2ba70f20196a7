"""FSDP2 on dense parts: what `fully_shard` must be told so that its gradients are those of the contract.

FSDP2 averages gradients over its ranks; here a rank's loss is its share, and gradients are summed. It must not touch
experts, which are different on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from equilibra.core.errors import InputError
from equilibra.execute.runtime import Runtime

__all__ = ["check_experts_are_whole", "sharded_and_summed"]

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
    """Whether FSDP2 shards the module's dense parameters; an error if it averages their gradients."""
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
