"""A plain expert-parallel MoE layer with no plan: what the runtime's own overhead is measured against.

Symbols: T tokens of this rank, K experts per token, E experts, R ranks, H = E / R homes per rank, N rows, D width.

    router -> sort pairs by expert -> all-to-all of counts -> all-to-all of rows -> experts one by one
    -> all-to-all back -> weigh and add up

The ordinary way, and no slower than need be: homes are contiguous, every expert has parameters of its own, gradients
are autograd's. Weights, gradients and router are those of a `BalancedMoE`, so both compute the same in the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.moe.router import Router

__all__ = ["PlainMoE"]


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:  # noqa: ANN401
        ctx.sizes = sent, received
        return _exchange(rows_ND, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:  # noqa: ANN401
        sent, received = ctx.sizes
        return _exchange(gradients[0].contiguous(), received, sent), None, None


def _all_to_all(rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result: Tensor = _AllToAll.apply(rows_ND, sent, received)  # type: ignore[no-untyped-call]
    return result


def _exchange(rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result = rows_ND.new_empty(sum(received), rows_ND.shape[1])
    dist.all_to_all_single(result, rows_ND, received, sent)
    return result


class PlainMoE(nn.Module):
    """One layer over the default process group."""

    def __init__(self, router: Router, experts: ExpertWeights) -> None:
        super().__init__()
        self.router, self.spec = router, experts.spec
        self.num_ranks = dist.get_world_size()
        self.stacked = {name: experts.get_parameter(name) for name in experts.names}
        for name, stack in self.stacked.items():
            parts = [nn.Parameter(part) for part in stack.detach().unbind(0)]  # views: the memory is shared
            setattr(self, f"{name}_of_home", nn.ParameterList(parts))

    def share_gradients(self) -> None:
        """Sum gradients into those of the stacked weights, which must be there."""
        for name, stack in self.stacked.items():
            assert stack.grad is not None
            for parameter, gradient in zip(getattr(self, f"{name}_of_home"), stack.grad.unbind(0), strict=True):
                parameter.grad = gradient

    def forward(self, tokens_TD: Tensor, recorded_TK: Tensor) -> Tensor:
        """Results [T, D] of tokens whose experts are given."""
        experts_TK, weights_TK = self.router(tokens_TD, recorded_TK)
        pair_of_row = experts_TK.flatten().argsort(stable=True)
        token_of_row = pair_of_row // self.spec.top_k
        told = experts_TK.flatten().bincount(minlength=self.spec.num_experts)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told)
        sent, received = (counts.view(self.num_ranks, -1).sum(dim=1).tolist() for counts in (told, heard))
        rows = _all_to_all(tokens_TD.index_select(0, token_of_row), sent, received)
        heard_RH = heard.view(self.num_ranks, -1)
        home_of_row = torch.arange(heard_RH.shape[1]).repeat(self.num_ranks).repeat_interleave(heard)
        grouped = home_of_row.argsort(stable=True)
        results = self._experts(rows.index_select(0, grouped), heard_RH.sum(dim=0).tolist())
        returned = _all_to_all(results.index_select(0, grouped.argsort()), received, sent)
        weighted = returned * weights_TK.flatten().index_select(0, pair_of_row)[:, None]
        return torch.zeros_like(tokens_TD).index_add(0, token_of_row, weighted)

    def _experts(self, rows_ND: Tensor, sizes: list[int]) -> Tensor:
        """One expert after another."""
        results = []
        for home, rows in enumerate(torch.split(rows_ND, sizes)):
            if len(rows):
                biases = [self._part(name, home) for name in ("gate_up_bias", "down_bias")]
                h = linear(rows, self.gate_up_of_home[home], biases[0])  # type: ignore[index]
                results.append(linear(activate(self.spec.activation, h), self.down_of_home[home], biases[1]))  # type: ignore[index]
        return torch.cat(results) if results else rows_ND

    def _part(self, name: str, home: int) -> Tensor | None:
        return getattr(self, f"{name}_of_home")[home] if name in self.stacked else None
