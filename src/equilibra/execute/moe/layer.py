"""MoE layers: `BalancedMoE` runs on several ranks under a plan; `ReferenceMoE` in one process defines correct.

    router (replayed or live) -> split -> dispatch -> experts (homes and copies) -> combine (+ shared expert)

Symbols: T tokens, D width, E experts, K experts per token, G groups of experts.

Routing replay (R3) takes the recorded experts and weights them by the live router's scores. Training computes what the
rollout computed, and the router still learns from the gradients of those weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.spec import GroupScore, MoESpec, RouterSpec, Score
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.moe.functions import run_visit
from equilibra.execute.record import direction_now
from equilibra.execute.runtime import Runtime

__all__ = ["BalancedMoE", "ReferenceMoE", "Router", "SharedExpert", "choose_experts", "weigh_experts"]

# --- router ---


class Router(nn.Module):
    """Scores tokens with a linear map; a selection bias, where the model has one, affects the choice only."""

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
        """[T, E] scores in at least float32, because small differences change the top-k."""
        with torch.autocast(tokens_TD.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = nn.functional.linear(tokens_TD.to(dtype), self.weight.to(dtype), bias)
            return logits.sigmoid() if self.spec.router.score is Score.SIGMOID else logits.softmax(dim=-1)

    def forward(
        self, tokens_TD: Tensor, recorded_TK: Tensor | None = None, *, complete: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Experts [T, K] and weights [T, K]; tokens without recorded experts (None, or -1) are routed live."""
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
    """[T, K] top-k experts by live scores; no gradient flows through the choice."""
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
    """[T, K] weights of the given experts from live scores."""
    weights_TK = scores_TE.gather(1, experts_TK)
    if router.normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * router.scale


# --- layers ---


class ReferenceMoE(nn.Module):
    """All experts in one process and plain autograd, slow on purpose: `BalancedMoE` gives the same under every plan."""

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
        """Takes hidden states [..., D]; recorded experts are replayed with live weights, rows of -1 are routed live."""
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
        part = self.experts
        h = rows_ND @ part["gate_up"][expert].t()
        if self.spec.expert_bias:
            h = h + part["gate_up_bias"][expert]
        y = activate(self.spec.activation, h) @ part["down"][expert].t()
        result: Tensor = y + part["down_bias"][expert] if self.spec.expert_bias else y
        return result


class SharedExpert(nn.Module):
    """The dense expert that every token passes."""

    def __init__(self, spec: MoESpec, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind = spec.activation
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.shared_ffn, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(spec.shared_ffn, spec.hidden, bias=False, device=device, dtype=dtype)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        result: Tensor = self.down(activate(self.kind, self.gate_up(tokens_TD)))
        return result


class BalancedMoE(nn.Module):
    """One expert-parallel layer. Build a model's layers in order; they share a runtime.

    Inside `with micro_batch:` it follows the armed plan; elsewhere tokens are routed live to the homes of experts.
    """

    def __init__(
        self, spec: MoESpec, runtime: Runtime, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.runtime = runtime
        layer = len(runtime.weights)
        placement = runtime.placement
        if placement.num_experts != spec.num_experts or layer >= placement.num_layers:
            raise InputError(
                f"cannot add MoE layer {layer} with {spec.num_experts} experts: the runtime's placement has "
                f"{placement.num_layers} layers of {placement.num_experts} experts; build it for this model"
            )
        self.router = Router(spec, device=device, dtype=dtype)
        homes = placement.homes_on(layer, runtime.group.rank)
        self.experts = ExpertWeights(spec, homes, device=device, dtype=dtype)
        self.shared = SharedExpert(spec, device=device, dtype=dtype) if spec.shared_ffn else None
        self.layer = runtime.register(self.experts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not for a compiler
    def forward(self, hidden: Tensor) -> Tensor:
        """Takes hidden states [..., D]; padding (see `MicroBatch.rows`) gets zeros."""
        if hidden.shape[-1] != self.spec.hidden:
            raise InputError(f"hidden states must be {self.spec.hidden} wide, not {tuple(hidden.shape)}")
        runtime, micro_batch = self.runtime, self.runtime.current
        flat_TD = hidden.reshape(-1, self.spec.hidden)
        recorded = None
        tokens_TD = flat_TD
        runtime.enter_layer(runtime.key(self.layer), direction_now())
        if micro_batch is not None:
            tokens_TD = micro_batch.select(flat_TD)
            recorded = micro_batch.experts(self.layer, hidden.device)
        experts_TK, weights_TK = self.router(
            tokens_TD, recorded, complete=micro_batch is not None and micro_batch.planned
        )
        out_TD = run_visit(runtime, self.layer, self._cast(tokens_TD), experts_TK, weights_TK)
        if self.shared is not None:
            out_TD = out_TD + self.shared(tokens_TD)
        out_TD = out_TD if micro_batch is None else micro_batch.among_padding(out_TD, flat_TD)
        return out_TD.reshape(hidden.shape)

    @staticmethod
    def _cast(tokens_TD: Tensor) -> Tensor:
        """Under autocast, rows travel and are computed in its dtype."""
        kind = tokens_TD.device.type
        return tokens_TD.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tokens_TD

    @torch.no_grad()
    def load_reference(self, reference: ReferenceMoE) -> None:
        """Copy this rank's share of a reference layer."""
        self.router.load_state_dict(reference.router.state_dict())
        if self.shared is not None and reference.shared is not None:
            self.shared.load_state_dict(reference.shared.state_dict())
        homes = torch.from_numpy(self.experts.experts.astype("int64"))
        for name in self.experts.names:
            self.experts.get_parameter(name).copy_(reference.experts[name][homes])
