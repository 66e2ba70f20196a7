"""NaN and infinities: which of many tensors hold one, with one read from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["names_of_nonfinite", "nonfinite"]


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor holds a NaN or an infinity. Tensors of whole numbers do not; shards tell of themselves."""
    looked_at, finite = [], []
    for number, tensor in enumerate(tensors):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point() and local.numel():
            wide = local if local.dtype.itemsize > 1 else local.float()
            looked_at.append(number)
            finite.append(torch.isfinite(torch.linalg.vector_norm(wide, ord=float("inf"))))
    found = [False] * len(tensors)
    if finite:
        flags = torch.stack([one.to(finite[0].device) for one in finite]).tolist()
        for number, flag in zip(looked_at, flags, strict=True):
            found[number] = not flag
    return found


def names_of_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Those of the tensors that hold a NaN or an infinity, in their order."""
    flags = nonfinite(list(tensors.values()))
    return [name for name, flag in zip(tensors, flags, strict=True) if flag]
