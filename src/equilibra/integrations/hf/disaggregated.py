"""The disaggregated engine for transformers models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.kernels import ExpertParts
from equilibra.integrations.hf.attention import HFAttention, build_attention
from equilibra.integrations.hf.families import moe_layers
from equilibra.integrations.hf.folder import ModelFolder, open_model_folder
from equilibra.rollout.setting import PoolModel

__all__ = ["embedded_folder", "pool_model", "weights_of_folder"]


def embedded_folder() -> ModelFolder:
    """The small model of `equilibra train`."""
    return open_model_folder(Path(str(files("equilibra.train") / "embedded")))


def pool_model(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device, end: int) -> PoolModel:
    """What a `Pool` needs to know of the model in a folder. end: the token that ends an answer."""
    layers = _moe_layers(folder)
    if not layers:
        raise InputError(f"the model in {folder.path} has no MoE layers: there are no experts to keep apart")
    if (getattr(folder.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        raise InputError("rope_type dynamic: answers would depend on the longest one beside them; use another engine")
    family = folder.family.model_type
    return PoolModel(
        spec=folder.spec, naming=folder.family.naming_for(layers), num_layers=len(layers),
        vocabulary=folder.config.vocab_size, attention=partial(build_attention, folder), end=end, dtype=dtype,
        device=device, load=(f"transformers.models.{family}.modeling_{family}", __name__),
    )  # fmt: skip


def _moe_layers(folder: ModelFolder) -> list[int]:
    """Numbers of the layers with experts, as transformers builds them."""
    with torch.device("meta"):
        return list(moe_layers(folder.build(torch.float32, expert_width=1)))


def weights_of_folder(folder: ModelFolder, dtype: torch.dtype, *, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All weights by published name, one at a time: from the folder's files, or random ones by the seed."""
    paths = sorted(folder.path.glob("*.safetensors"))
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if name != "lm_head.weight" or not folder.config.tie_word_embeddings:
                        yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
    if not paths:
        yield from _random_weights(folder, dtype, seed)


def _random_weights(folder: ModelFolder, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    for name, (target,) in HFAttention(folder, dtype, torch.device("cpu")).targets.items():
        yield name, target.view
    spec, naming = folder.spec, folder.family.naming_for(_moe_layers(folder))
    layout, std = FlatLayout(spec.part_shapes()), float(getattr(folder.config, "initializer_range", 0.02))
    for layer in range(len(_moe_layers(folder))):
        rows = np.random.default_rng([seed, layer]).normal(scale=std, size=(spec.num_experts, layout.size))
        experts: list[ExpertParts] = layout.experts(torch.from_numpy(rows).to(dtype))
        entries = [naming.entries(spec, layer, number, parts) for number, parts in enumerate(experts)]
        for of_name in zip(*entries, strict=True) if naming.stacked else ():
            yield of_name[0].name, torch.stack([entry.value.reshape(entry.shape) for entry in of_name])
        for entry in () if naming.stacked else (entry for of_expert in entries for entry in of_expert):
            yield entry.name, entry.value.reshape(entry.shape)
