"""The disaggregated engine for transformers models."""

from __future__ import annotations

from functools import partial

import torch

from equilibra.core.errors import InputError
from equilibra.integrations.hf.attention import build_attention
from equilibra.integrations.hf.families import FAMILIES
from equilibra.integrations.hf.folder import ModelFolder
from equilibra.rollout.pool import PoolModel

__all__ = ["pool_model"]


def pool_model(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device, end: int) -> PoolModel:
    """What a `Pool` needs to know of the model in a folder."""
    layers = moe_layer_numbers(folder)
    if not layers:
        raise InputError(f"the model in {folder.path} has no MoE layers: there are no experts to keep apart")
    family = folder.family.model_type
    return PoolModel(
        spec=folder.spec, naming=folder.family.naming_for(layers), num_layers=len(layers),
        attention=partial(build_attention, folder), end=end, dtype=dtype, device=device,
        load=(f"transformers.models.{family}.modeling_{family}", __name__),
    )  # fmt: skip


def moe_layer_numbers(folder: ModelFolder) -> list[int]:
    """Layers with experts, as transformers builds them."""
    config, count = folder.config, folder.config.num_hidden_layers
    assert config.model_type in FAMILIES
    if config.model_type == "qwen3_moe":
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        return [n for n in range(count) if n not in dense and (n + 1) % step == 0]
    return list(range(getattr(config, "first_k_dense_replace", 0), count))
