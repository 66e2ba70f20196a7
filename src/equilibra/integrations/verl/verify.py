"""verl's first updates with and without a plan: the same mini-batch, loss and gradients, or an error.

The pass without runs first; verl goes on with the output and the gradients of the pass under the plan. So training is
the same as without `verify_steps`, and an update costs one more forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from equilibra.integrations.differences import check, table
from equilibra.integrations.megatron.verify import compare
from equilibra.integrations.verl.engine import BalancedEngine

__all__ = ["verified"]


def verified(balanced: BalancedEngine, plain: Callable[[], Any], under_plan: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Collective: what the pass under the plan returned; metrics are differences in units of what rounding explains."""
    balanced.to_verify -= 1
    returned, found = compare(balanced.balancer, balanced.engine.module, plain, under_plan, _outputs)
    if dist.get_rank() == 0:
        print(f"Equilibra compared an update with and without its plan:\n{table(found)}", flush=True)
    check(found)
    for one in found:
        balanced.waiting[f"equilibra/verify_{one.what.split()[-1]}"] = one.found / one.allowed
    return returned


def _outputs(returned: dict[str, Any]) -> Any:  # noqa: ANN401
    """Losses and log-probabilities; nothing but on the last pipeline stage."""
    return {name: returned.get(name) for name in ("loss", "model_output")}
