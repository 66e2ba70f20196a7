"""Hugging Face transformers: train and sample MoE models from a config or a checkpoint folder, on several ranks."""

from equilibra.integrations.hf.families import Family, family_of
from equilibra.integrations.hf.folder import ModelFolder, Text, open_model_folder, text_of
from equilibra.integrations.hf.model import ShardedModel, build_model
from equilibra.integrations.hf.replica import Replica
from equilibra.integrations.hf.sharded_experts import register_experts, shard_experts

__all__ = [
    "Family", "ModelFolder", "Replica", "ShardedModel", "Text", "build_model", "family_of", "open_model_folder",
    "register_experts", "shard_experts", "text_of",
]  # fmt: skip
