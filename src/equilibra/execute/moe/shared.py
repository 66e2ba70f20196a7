"""The shared expert: an ordinary gated block that every token passes, on the token's own rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.spec import MoESpec

__all__ = ["SharedExpert"]


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
