"""Experts of a whole transformers model as one product per expert, in any floating-point type.

transformers' own `grouped_mm` knows no float64, and its `eager` is slow for many experts. Families whose experts are
kept transposed (gpt-oss) stay with `eager`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equilibra.execute.experts import expert_math
from equilibra.execute.experts.spec import Activation
from equilibra.execute.kernels.parts import ExpertParts

__all__ = ["use_plain_experts"]

NAME = "equilibra-plain"


def use_plain_experts(model: Any, *, transposed: bool) -> None:  # noqa: ANN401 - transformers' classes have no common type
    """Choose how a model computes its experts when it samples."""
    if transposed:
        model.set_experts_implementation("eager")
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    model.set_experts_implementation(NAME)


def _experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:  # noqa: ANN401
    """Sum of every token's experts, weighted; no gradient flows."""
    top_k = experts_TK.shape[-1]
    order = experts_TK.flatten().argsort(stable=True)
    sizes = torch.bincount(experts_TK.flatten(), minlength=len(module.down_proj)).tolist()
    instances = [ExpertParts(g, d) for g, d in zip(module.gate_up_proj, module.down_proj, strict=True)]
    rows_ND, _ = expert_math.forward(Activation.SWIGLU, hidden_TD[order // top_k], sizes, instances)
    results = torch.empty_like(rows_ND)
    results[order] = rows_ND
    results_TKD = results.view(-1, top_k, hidden_TD.shape[-1])
    return (results_TKD * weights_TK.to(results.dtype)[:, :, None]).sum(dim=1)
