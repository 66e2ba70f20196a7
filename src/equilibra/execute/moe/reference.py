"""The definition of correct: one MoE layer, all experts in one process, one expert after another, plain autograd.

Slow on purpose. `BalancedMoE` must give the same outputs, losses and gradients under every plan.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.moe.router import Router

__all__ = ["ReferenceMoE", "SharedExpert"]


class ReferenceMoE(nn.Module):
    """Router, experts and shared expert of one layer."""

    def __init__(self, spec: MoESpec, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec, dtype=dtype)
        self.experts = nn.ParameterDict({
            name: nn.Parameter(torch.randn(spec.num_experts, *shape, dtype=dtype) / shape[-1] ** 0.5)
            for name, shape in spec.part_shapes().items()
        })  # fmt: skip
        self.shared = SharedExpert(spec, dtype=dtype) if spec.shared_ffn else None

    def forward(self, hidden: Tensor, recorded_TK: Tensor | None = None) -> Tensor:
        """Hidden states of any leading shape; with a recording, its experts with live weights; rows of -1 are live."""
        tokens_TD = hidden.reshape(-1, self.spec.hidden)
        experts_TK, weights_TK = self.router(tokens_TD, recorded_TK, complete=False)
        out_TD = torch.zeros_like(tokens_TD)
        for expert in range(self.spec.num_experts):
            token, choice = torch.nonzero(experts_TK == expert, as_tuple=True)
            result = self.expert(expert, tokens_TD[token]) * weights_TK[token, choice, None].to(tokens_TD.dtype)
            out_TD = out_TD.index_add(0, token, result)
        if self.shared is not None:
            out_TD = out_TD + self.shared(tokens_TD)
        return out_TD.reshape(hidden.shape)

    def expert(self, expert: int, rows_ND: Tensor) -> Tensor:
        """One expert's results."""
        part = self.experts
        h = rows_ND @ part["gate_up"][expert].t()
        if self.spec.expert_bias:
            h = h + part["gate_up_bias"][expert]
        y = activate(self.spec.activation, h) @ part["down"][expert].t()
        result: Tensor = y + part["down_bias"][expert] if self.spec.expert_bias else y
        return result


class SharedExpert(nn.Module):
    """Two matrices with the layer's activation between them."""

    def __init__(self, spec: MoESpec, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind = spec.activation
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.shared_ffn, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(spec.shared_ffn, spec.hidden, bias=False, device=device, dtype=dtype)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        """Results for all tokens."""
        result: Tensor = self.down(activate(self.kind, self.gate_up(tokens_TD)))
        return result
