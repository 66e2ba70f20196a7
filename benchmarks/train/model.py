"""The model of the training bench: a Qwen3-MoE from a seed, with routers skewed as RL leaves them.

Symbols: V tokens of the vocabulary, D width, E experts.

A fresh model routes almost evenly and leaves nothing to balance. Models trained without an auxiliary loss favour some
experts whatever the token is. So:

    embeddings_V  random directions of length sqrt(D), plus a direction u half as long that all tokens share
    router_E      random rows, which spread the scores by s; plus skew * s * |n_E| / (u's part of a token) along u, with
                  n_E normal, for the experts at home on one rank, and minus as much for those on the other

The favoured rank alternates from layer to layer. So scores of the favoured half are raised and those of the other half
lowered for every token; the rest of the token decides among them as before. At skew 0 routing is random.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.runtime.case import CLUSTER
from benchmarks.train.setting import PROMPT_TOKENS, TrainSetting
from equilibra.integrations.hf import ShardedModel
from equilibra.train.config import (
    AlgorithmConfig,
    BalanceConfig,
    ClusterConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)

HEAD = 64
"""width of an attention head"""
SHARED = 0.5
"""length of the direction that all tokens share, over that of a token's own"""


def write_model_folder(setting: TrainSetting, folder: Path) -> None:
    """config.json of the model; weights come from the seed."""
    heads = setting.hidden // HEAD
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 320,
        "hidden_size": setting.hidden, "intermediate_size": setting.ffn, "moe_intermediate_size": setting.ffn,
        "num_hidden_layers": setting.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": HEAD, "num_experts": setting.experts, "num_experts_per_tok": setting.top_k, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "initializer_range": 0.02, "tie_word_embeddings": False,
        "max_position_embeddings": PROMPT_TOKENS + setting.answer_tokens, "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }))  # fmt: skip


def config_of(setting: TrainSetting, folder: Path) -> TrainConfig:
    """The configuration of a GRPO run on a reasoning-gym task; at a learning rate of 0 the work stays the same."""
    return TrainConfig(
        run=RunConfig(
            seed=setting.seed, dtype="float32", device="cpu", timeout_s=setting.timeout_s, evaluate_problems=1
        ),
        cluster=ClusterConfig(nodes=CLUSTER.num_nodes, ranks_per_node=CLUSTER.ranks_per_node),
        model=ModelConfig(source=str(folder)),
        task=TaskConfig(name="spell_backward", options={"min_word_len": 3, "max_word_len": 10}),
        rollout=RolloutConfig(
            prompts=setting.prompts, answers=setting.answers, max_prompt_tokens=PROMPT_TOKENS,
            max_answer_tokens=setting.answer_tokens, reward_cut_off=True,
        ),
        algorithm=AlgorithmConfig(mini_batches=setting.mini_batches),
        optimizer=OptimizerConfig(lr=0.0),
        balance=BalanceConfig(
            tokens_per_rank=setting.tokens_per_rank, spare_slots=setting.spare_slots, path=setting.path
        ),
    )  # fmt: skip


@torch.no_grad()
def skew_routers(model: ShardedModel, setting: TrainSetting) -> None:
    """Change embeddings and routers, in place; the same on every rank."""
    random = np.random.default_rng([setting.seed, 3])
    width, experts = setting.hidden, setting.experts
    shared_D = random.normal(size=width)
    shared_D /= np.linalg.norm(shared_D)
    embeddings = model.get_parameter("model.model.embed_tokens.weight")
    own_VD = random.normal(size=tuple(embeddings.shape))
    embeddings.copy_(torch.from_numpy(own_VD + SHARED * width**0.5 * shared_D))
    part = SHARED / (1 + SHARED**2) ** 0.5 * width**0.5  # of a token along the shared direction, once it is normed
    for number, moe in enumerate(model.moe_layers):
        weight = moe.router.weight
        spread = float(weight.std()) * width**0.5
        favoured_E = np.arange(experts) * CLUSTER.num_ranks // experts == number % CLUSTER.num_ranks
        shift_E = setting.skew * spread / part * np.abs(random.normal(size=experts)) * np.where(favoured_E, 1, -1)
        weight.add_(torch.from_numpy(np.outer(shift_E, shared_D)).to(weight.dtype))
