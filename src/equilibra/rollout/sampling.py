"""Draw tokens with noise that comes with the request, so that an answer does not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["draw"]


def draw(logits_BV: Tensor, noise: Sequence[float], temperature: float) -> tuple[Tensor, Tensor]:
    """Sample a token per row, the first whose cumulative probability exceeds the noise; and its log-prob."""
    logits = logits_BV.double()
    if temperature == 0:
        chosen = logits.argmax(dim=-1)
    else:
        logits = logits / temperature
        sums = logits.softmax(dim=-1).cumsum(dim=-1)
        level = torch.tensor(noise, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, level, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen, logits.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
