"""Router: tokens to experts and weights, live or replayed.

Symbols: T tokens, D width, E experts, K experts per token, G groups of experts.

Replay (R3): the experts are the recorded ones, the weights are the live router's scores of them. So training computes
what the rollout computed, and the router still learns: the gradient of a weight reaches the logits of the recorded
experts (and, through softmax, of all).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibra.execute.experts.spec import GroupScore, MoESpec, RouterSpec, Score

__all__ = ["Router", "choose_experts", "weigh_experts"]


class Router(nn.Module):
    """The linear map and, where the model has one, the bias that only chooses."""

    def __init__(self, spec: MoESpec, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.zeros(spec.num_experts, device=device, dtype=dtype)) if spec.router.bias else None
        )
        self.selection_bias: Tensor | None
        bias = torch.zeros(spec.num_experts, device=device) if spec.router.selection_bias else None
        self.register_buffer("selection_bias", bias)
        nn.init.normal_(self.weight, std=0.02)

    def scores(self, tokens_TD: Tensor) -> Tensor:
        """[T, E] scores, in float32 at least: small differences decide."""
        with torch.autocast(tokens_TD.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = nn.functional.linear(tokens_TD.to(dtype), self.weight.to(dtype), bias)
            return logits.sigmoid() if self.spec.router.score is Score.SIGMOID else logits.softmax(dim=-1)

    def forward(
        self, tokens_TD: Tensor, recorded_TK: Tensor | None = None, *, complete: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Experts [T, K] and weights [T, K].

        Without a recording all tokens are routed live; in one that is not complete, those whose experts are -1.
        """
        scores_TE = self.scores(tokens_TD)
        if recorded_TK is None:
            experts_TK = choose_experts(scores_TE, self.spec, self.selection_bias)
        elif complete:
            experts_TK = recorded_TK.long()  # what gather takes
        else:
            live_TK = choose_experts(scores_TE, self.spec, self.selection_bias)
            experts_TK = torch.where(recorded_TK < 0, live_TK, recorded_TK)
        return experts_TK, weigh_experts(scores_TE, experts_TK, self.spec.router)


def choose_experts(scores_TE: Tensor, spec: MoESpec, selection_bias_E: Tensor | None = None) -> Tensor:
    """[T, K] the experts a live router chooses; no gradient flows through the choice."""
    router = spec.router
    choice_TE = scores_TE.detach()
    if selection_bias_E is not None:
        choice_TE = choice_TE + selection_bias_E.to(choice_TE.dtype)
    if router.num_groups > 1:
        choice_TGe = choice_TE.view(len(choice_TE), router.num_groups, spec.num_experts // router.num_groups)
        best = min(2 if router.group_score is GroupScore.TOP2 else 1, choice_TGe.shape[-1])
        rank_TG = choice_TGe.topk(best, dim=-1).values.sum(dim=-1)
        kept = rank_TG.topk(router.top_groups, dim=-1).indices
        allowed_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(1, kept, value=True)
        choice_TE = choice_TGe.masked_fill(~allowed_TG[:, :, None], -torch.inf).flatten(1)
    return choice_TE.topk(spec.top_k, dim=-1).indices


def weigh_experts(scores_TE: Tensor, experts_TK: Tensor, router: RouterSpec) -> Tensor:
    """[T, K] weights of the given experts, from live scores."""
    weights_TK = scores_TE.gather(1, experts_TK)
    if router.normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * router.scale
