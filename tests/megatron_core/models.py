"""Small Megatron models on CPUs, and their routing: what the tests of the integration share.

Symbols: M micro-batches, L MoE layers, T tokens of a rank, K experts per token, E experts.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from tests.megatron_core import shims, stand_ins
from torch import Tensor

HIDDEN, FFN, VOCABULARY, SEQUENCE = 16, 24, 32, 12
NUM_EXPERTS, TOP_K = 8, 2
SKEW = 2.0


def join(
    expert_parallel: int, pipeline: int = 1, virtual: int | None = None, tensor: int = 1, context: int = 1
) -> None:
    """Megatron's process groups over the world of the test."""
    shims.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=context,
        expert_model_parallel_size=expert_parallel,
        create_gloo_process_groups=False,
    )


def config(num_layers: int = 2, **options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": num_layers, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": FFN,
        "moe_ffn_hidden_size": FFN, "num_moe_experts": NUM_EXPERTS, "moe_router_topk": TOP_K,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32,
    }  # fmt: skip
    from megatron.core import parallel_state as groups

    values["expert_model_parallel_size"] = groups.get_expert_model_parallel_world_size()
    values["pipeline_model_parallel_size"] = groups.get_pipeline_model_parallel_world_size()
    values["expert_tensor_parallel_size"] = 1
    values["tensor_model_parallel_size"] = groups.get_tensor_model_parallel_world_size()
    values["context_parallel_size"] = groups.get_context_parallel_world_size()
    values["sequence_parallel"] = values["tensor_model_parallel_size"] > 1
    values["pipeline_dtype"] = options.get("params_dtype", torch.float32)
    return TransformerConfig(**{**values, **options})


def moe_layer(settings: Any, seed: int = 1) -> Any:
    """One layer, with the same experts by number however many ranks there are."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    layer = build_module(spec, config=settings) if isinstance(spec, ModuleSpec) else spec(config=settings)
    layer.set_layer_number(1)
    fill(layer, seed)
    return layer


def class_of_spec(spec: Any) -> Any:
    """The class that a specification builds: a ModuleSpec, since 0.18 a partial."""
    return getattr(spec, "module", None) or spec.func


def gpt(settings: Any, seed: int = 1, *, pre: bool = True, post: bool = True, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    if settings.moe_layer_freq != 1:
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, vp_stage=vp_stage)
    if settings.sequence_parallel or settings.context_parallel_size > 1:
        spec = stand_ins.block_of(spec, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            settings, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, pre_process=pre, post_process=post,
            share_embeddings_and_output_weights=False, vp_stage=vp_stage,
        )  # fmt: skip
    fill(model, seed)
    return model


@torch.no_grad()
def fill(module: Any, seed: int) -> None:
    """Weights that depend on their names and experts' numbers only, so that models of all shapes are the same model."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            continue
        where, number = name, 0
        if ".local_experts." in f".{name}":
            head, _, tail = name.partition("local_experts.")
            slot, _, part = tail.partition(".")
            number = expert_of_slot(module, head, int(slot))
            where = head + part
        key = [seed, number, *where.encode()]
        values = np.random.default_rng(key).normal(0, parameter.shape[-1] ** -0.5, parameter.shape)
        parameter.copy_(torch.from_numpy(values))


def expert_of_slot(module: Any, path: str, slot: int) -> int:
    experts = module.get_submodule(path.rstrip("."))
    return int(experts.ep_group.rank() * experts.num_local_experts + slot)


def routing(
    seed: int, rank: int, num_micro_batches: int, num_layers: int, num_tokens: int, skew: float = 1.5
) -> list[list[Tensor]]:
    """[M][L] ids [T, K] of this rank, all different in a row; a few experts get most of them."""
    rng, popular = np.random.default_rng([seed, rank]), np.random.default_rng(seed)
    result = []
    for _ in range(num_micro_batches):
        layers = []
        for _ in range(num_layers):
            weights = popular.permutation(np.arange(1, NUM_EXPERTS + 1.0) ** -skew)
            noise = rng.gumbel(size=(num_tokens, NUM_EXPERTS))
            layers.append(torch.from_numpy(np.argsort(-(np.log(weights) + noise), axis=1)[:, :TOP_K].copy()))
        result.append(layers)
    return result
