"""MoE families of transformers: what an MoE layer is by the model's configuration, and where its parts are.

| family      | router                              | experts                       | block returns         |
|---|---|---|---|
| qwen3_moe   | softmax, normalised by config        | moe_intermediate_size         | hidden states         |
| olmoe       | softmax, normalised by config        | intermediate_size             | hidden states         |
| mixtral     | softmax, normalised                  | intermediate_size             | hidden states         |
| deepseek_v3 | sigmoid, groups, selection bias      | moe_intermediate_size, shared | hidden states         |
| gpt_oss     | softmax of the chosen, with bias     | intermediate_size, biases     | hidden states, scores |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from equilibra.core.errors import InputError
from equilibra.execute.experts import Activation, MoESpec, RouterSpec, Score
from equilibra.execute.state.published import Naming, naming_of


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family of transformers describes and builds its MoE layers."""

    model_type: str
    """as in config.json"""
    expert_width: str
    """configuration key of an expert's inner width"""
    router: str = "gate"
    """attribute of the MoE block that holds the router"""
    naming: str
    """naming of published tensors, see `safetensors_names`"""
    returns_scores: bool = False
    """whether the block returns router scores as a second value"""
    spec: Callable[[Any], MoESpec]
    """makes the MoE layer's spec from the configuration"""

    def naming_for(self, layer_numbers: list[int]) -> Naming:
        """Names of the published tensors of a model whose MoE layers have these numbers."""
        return naming_of(self.naming).with_layers(layer_numbers)


def _spec(config: Any, width: str, num_experts: int, **more: Any) -> MoESpec:  # noqa: ANN401
    return MoESpec(
        hidden=config.hidden_size, expert_ffn=getattr(config, width), num_experts=num_experts,
        top_k=config.num_experts_per_tok, **more,
    )  # fmt: skip


def _softmax(config: Any, width: str) -> MoESpec:  # noqa: ANN401
    return _spec(config, width, config.num_experts, router=RouterSpec(normalise=bool(config.norm_topk_prob)))


def _mixtral(config: Any) -> MoESpec:  # noqa: ANN401
    if config.router_jitter_noise:
        raise InputError(
            f"router_jitter_noise is {config.router_jitter_noise}: replayed routing needs a router without noise; "
            "set it to 0"
        )
    return _spec(config, "intermediate_size", config.num_local_experts)


def _deepseek_v3(config: Any) -> MoESpec:  # noqa: ANN401
    router = RouterSpec(
        score=Score.SIGMOID, normalise=bool(config.norm_topk_prob), scale=float(config.routed_scaling_factor),
        selection_bias=True, num_groups=config.n_group, top_groups=config.topk_group,
    )  # fmt: skip
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return _spec(config, "moe_intermediate_size", config.n_routed_experts, router=router, shared_ffn=shared)


def _gpt_oss(config: Any) -> MoESpec:  # noqa: ANN401
    activation = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    if activation != (1.702, 7.0):
        raise InputError(f"swiglu_alpha and swiglu_limit are {activation}: only 1.702 and 7.0 are supported")
    return _spec(
        config, "intermediate_size", config.num_local_experts, router=RouterSpec(bias=True),
        activation=Activation.CLAMPED_SWIGLU, expert_bias=True,
    )  # fmt: skip


NARROW, WIDE = "moe_intermediate_size", "intermediate_size"
FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="qwen3_moe", expert_width=NARROW, naming="qwen3-moe", spec=partial(_softmax, width=NARROW)),
        Family(model_type="olmoe", expert_width=WIDE, naming="olmoe", spec=partial(_softmax, width=WIDE)),
        Family(model_type="mixtral", expert_width=WIDE, naming="mixtral", spec=_mixtral),
        Family(model_type="deepseek_v3", expert_width=NARROW, naming="deepseek", spec=_deepseek_v3),
        Family(
            model_type="gpt_oss", expert_width=WIDE, router="router", naming="gpt-oss", returns_scores=True,
            spec=_gpt_oss,
        ),
    )
}  # fmt: skip


def family_of(model_type: str) -> Family:
    """The family of a configuration's model_type."""
    if model_type not in FAMILIES:
        raise InputError(f"models of type {model_type!r} are not supported: use one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def moe_layers(model: Any) -> dict[int, Any]:  # noqa: ANN401 - transformers' classes have no common type
    """The decoder layers of a transformers model that have experts, by number."""
    return {number: layer for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
