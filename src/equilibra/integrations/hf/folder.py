"""A model's folder: config.json, perhaps weights (safetensors) and a tokenizer. Nothing in it is ever executed."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from equilibra.core.errors import InputError
from equilibra.execute.experts.spec import MoESpec
from equilibra.integrations.hf.families import Family, family_of

__all__ = ["ModelFolder", "open_model_folder"]

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """What a folder says of a model."""

    path: Path
    """the folder"""
    config: Any
    """transformers' configuration"""
    family: Family
    """of the model"""

    @property
    def spec(self) -> MoESpec:
        """Its MoE layers."""
        return self.family.spec(self.config)

    @property
    def has_weights(self) -> bool:
        """Whether training starts from weights in the folder."""
        return any(self.path.glob("*.safetensors"))

    @property
    def has_tokenizer(self) -> bool:
        """Whether text is cut as the folder says."""
        return (self.path / "tokenizer.json").is_file() or (self.path / "tokenizer_config.json").is_file()

    def config_file(self, dtype: torch.dtype) -> bytes:
        """The config.json to publish beside weights of that type."""
        config = copy.deepcopy(self.config)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family.model_type]]
        config.dtype = str(dtype).removeprefix("torch.")
        return (json.dumps(config.to_dict(), indent=2, default=str) + "\n").encode()


def open_model_folder(path: str | Path) -> ModelFolder:
    """Read config.json and find the family; the model's own code, if a folder brings some, is not run."""
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"cannot use {path} as a model: there is no {file.name} in it")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"cannot read {file}: {file.stat().st_size} bytes are too many for a configuration")
        said = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise InputError(f"cannot read {file}: it must say a model_type, such as qwen3_moe")
    family = family_of(said["model_type"])
    if said.get("quantization_config") is not None:
        raise InputError(f"cannot train {path}: its weights are quantized; convert them to bfloat16 first")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        folder = ModelFolder(path=path, config=config, family=family)
        _ = folder.spec
    except InputError as error:
        raise InputError(f"cannot use {file}: {error}") from error
    except Exception as error:  # whatever transformers raises on strange values
        raise InputError(f"cannot use {file}: {type(error).__name__}: {str(error)[:300]}") from error
    return folder
