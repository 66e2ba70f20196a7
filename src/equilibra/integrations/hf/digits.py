"""Norms of a float64 model in float64.

transformers computes RMS norms in float32 whatever the model's type is. In a float64 model that rounds to eight digits
where the sixteenth differs between planners, and a value on the edge falls to either side: after some steps two runs
that should be the same are not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["keep_digits"]


def keep_digits(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the norms of a float64 model compute in float64; other types stay as they are."""
    if dtype != torch.float64:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            object.__setattr__(module, "forward", partial(_norm, module))


def _norm(module: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401 - every family has a class of its own
    scaled: Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * scaled  # type: ignore[no-any-return]
