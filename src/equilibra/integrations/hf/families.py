"""MoE families of transformers: what their configuration says of an MoE layer, and where its parts are.

| family      | router                              | experts                       | block returns         |
|---|---|---|---|
| qwen3_moe   | softmax, normalised by config        | moe_intermediate_size         | hidden states         |
| olmoe       | softmax, normalised by config        | intermediate_size             | hidden states         |
| mixtral     | softmax, normalised                  | intermediate_size             | hidden states         |
| deepseek_v3 | sigmoid, groups, a bias that chooses | moe_intermediate_size, shared | hidden states         |
| gpt_oss     | softmax of the chosen, with bias     | intermediate_size, biases     | hidden states, scores |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equilibra.core.errors import InputError
from equilibra.execute.experts.spec import Activation, MoESpec, RouterSpec, Score
from equilibra.execute.state.safetensors_names import Naming, naming_of

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family."""

    model_type: str
    """in config.json"""
    expert_width: str
    """the configuration's name for the inner width of an expert"""
    router: str
    """the block's attribute that holds the router"""
    naming: str
    """of published tensors, see `safetensors_names`"""
    returns_scores: bool = False
    """whether the block returns a second value"""
    spec: Callable[[Any], MoESpec]
    """an MoE layer from the configuration"""

    def naming_for(self, layer_numbers: list[int]) -> Naming:
        """Names of the published tensors of a model whose MoE layers have these numbers."""
        return naming_of(self.naming).with_layers(layer_numbers)


def _qwen3(config: Any) -> MoESpec:  # noqa: ANN401
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=config.moe_intermediate_size, num_experts=config.num_experts,
        top_k=config.num_experts_per_tok, router=RouterSpec(normalise=bool(config.norm_topk_prob)),
    )  # fmt: skip


def _olmoe(config: Any) -> MoESpec:  # noqa: ANN401
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=config.intermediate_size, num_experts=config.num_experts,
        top_k=config.num_experts_per_tok, router=RouterSpec(normalise=bool(config.norm_topk_prob)),
    )  # fmt: skip


def _mixtral(config: Any) -> MoESpec:  # noqa: ANN401
    if config.router_jitter_noise:
        raise InputError(
            f"router_jitter_noise is {config.router_jitter_noise}: replayed routing needs a router without noise; "
            "set it to 0"
        )
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=config.intermediate_size, num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
    )  # fmt: skip


def _deepseek_v3(config: Any) -> MoESpec:  # noqa: ANN401
    router = RouterSpec(
        score=Score.SIGMOID, normalise=bool(config.norm_topk_prob), scale=float(config.routed_scaling_factor),
        selection_bias=True, num_groups=config.n_group, top_groups=config.topk_group,
    )  # fmt: skip
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=config.moe_intermediate_size, num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok, router=router,
        shared_ffn=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )  # fmt: skip


def _gpt_oss(config: Any) -> MoESpec:  # noqa: ANN401
    activation = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    if activation != (1.702, 7.0):
        raise InputError(f"swiglu_alpha and swiglu_limit are {activation}: experts are known with 1.702 and 7.0 only")
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=config.intermediate_size, num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok, router=RouterSpec(bias=True), activation=Activation.CLAMPED_SWIGLU,
        expert_bias=True,
    )  # fmt: skip


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3_moe", expert_width="moe_intermediate_size", router="gate", naming="qwen3-moe", spec=_qwen3
        ),
        Family(model_type="olmoe", expert_width="intermediate_size", router="gate", naming="olmoe", spec=_olmoe),
        Family(model_type="mixtral", expert_width="intermediate_size", router="gate", naming="mixtral", spec=_mixtral),
        Family(
            model_type="deepseek_v3",
            expert_width="moe_intermediate_size",
            router="gate",
            naming="deepseek",
            spec=_deepseek_v3,
        ),
        Family(
            model_type="gpt_oss",
            expert_width="intermediate_size",
            router="router",
            naming="gpt-oss",
            returns_scores=True,
            spec=_gpt_oss,
        ),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a configuration's model_type."""
    if model_type not in FAMILIES:
        raise InputError(f"models of type {model_type!r} are not supported: there are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
