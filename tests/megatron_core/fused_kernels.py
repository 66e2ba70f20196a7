"""What DeepEP's and HybridEP's kernels promise, over gloo, so that Megatron's flex dispatchers run on CPUs.

Symbols: T tokens of a rank, N tokens of all ranks, K experts per token, E experts, R rows, D width.

Tokens of all ranks are gathered and each rank keeps those of its experts; outputs are summed over ranks. Slow, and
the same values: a token arrives once on a rank (DeepEP) or once for each of its experts (HybridEP), ordered by source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["install"]


def install() -> None:
    """Once in a process, before layers are built."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    for name, kernel in {
        "fused_dispatch": fused_dispatch, "fused_combine": fused_combine, "set_deepep_num_sms": lambda _num_sms: None,
        "hybrid_ep_dispatch": hybrid_ep_dispatch, "hybrid_ep_combine": hybrid_ep_combine,
    }.items():  # fmt: skip
        setattr(fused_a2a, name, kernel)
        setattr(token_dispatcher, name, kernel)


def fused_dispatch(
    x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **_options: Any
) -> Any:
    """DeepEP: tokens [R, D] with at least one expert here, its local numbers [R, K] or -1, and probabilities [R, K]."""
    num_local = num_experts // group.size()
    sizes = _sizes(x, group)
    x_ND, probs_NK = _Gather.apply(x, group, sizes), _Gather.apply(token_probs, group, sizes)
    local_NK = _gather(token_indices, group, sizes) - group.rank() * num_local
    here_NK = (local_NK >= 0) & (local_NK < num_local) & (_gather(token_indices, group, sizes) >= 0)
    kept = here_NK.any(dim=1).nonzero().flatten()
    local_RK = local_NK.masked_fill(~here_NK, -1)[kept]
    counts = torch.bincount(local_RK[local_RK >= 0], minlength=num_local)
    probs_RK = probs_NK[kept] * here_NK[kept]
    return x_ND[kept], local_RK, probs_RK, counts, (kept, sizes)


def fused_combine(x: Tensor, group: Any, handle: Any, **_options: Any) -> tuple[Tensor, None]:
    """DeepEP: the sum over ranks of each token's output [T, D]."""
    kept, sizes = handle
    return _Scatter.apply(x.new_zeros(sum(sizes), x.shape[1]).index_add(0, kept, x), group, sizes), None


def hybrid_ep_dispatch(
    *, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_options: Any
) -> Any:
    """HybridEP: rows [R, D] and probabilities [R] ordered by expert, then token."""
    sizes, first = _sizes(x, group), group.rank() * num_local_experts
    x_ND, probs_NE = _Gather.apply(x, group, sizes), _Gather.apply(probs, group, sizes)
    map_EN = _gather(routing_map.to(torch.uint8), group, sizes)[:, first : first + num_local_experts].t()
    expert, token = map_EN.nonzero(as_tuple=True)
    return x_ND[token], probs_NE[token, first + expert], None, map_EN.sum(dim=1).long(), (token, sizes, group)


def hybrid_ep_combine(*, x: Tensor, handle: Any, **_options: Any) -> Tensor:
    """HybridEP: the sum over ranks and experts of each token's output [T, D]."""
    token, sizes, group = handle
    return _Scatter.apply(x.new_zeros(sum(sizes), x.shape[1]).index_add(0, token, x), group, sizes)


def _sizes(x: Tensor, group: Any) -> list[int]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, len(x), group=group)
    return every


def _gather(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    parts = [x.new_empty(size, *x.shape[1:]) for size in sizes]
    for source, part in enumerate(parts):
        if source == group.rank():
            part.copy_(x)
        dist.broadcast(part, dist.get_global_rank(group, source), group=group)
    return torch.cat(parts)


def _own_sum(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].clone()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _gather(x.contiguous(), group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_sum(gradient, ctx.group, ctx.sizes), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _own_sum(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient.contiguous(), ctx.group, ctx.sizes), None, None
