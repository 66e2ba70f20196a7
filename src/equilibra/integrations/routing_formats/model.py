"""The model behind a routing report: its layers, its experts, and which layers are dense.

Engines report a column per decoder layer and fill only those of MoE layers: dense layers are columns of zeros. Reports
do not say which layers are dense. That comes from the model's config.json, or from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibra.core.atomic import cannot
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import located
from equilibra.trace.routing import id_dtype

__all__ = ["RoutedModel", "model_from_config", "model_from_folder", "read_config"]

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""keys under which configurations keep the number of experts per layer"""
MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """Shape of the model that an engine reports about."""

    num_layers: int
    """decoder layers including dense ones: the columns of a report"""
    top_k: int
    """experts per token"""
    num_experts: int
    """routed experts per MoE layer, without shared ones"""
    dense_layers: tuple[int, ...] = ()
    """decoder layers without experts, ascending"""

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k"):
            check_whole(name, getattr(self, name), low=1, high=MAX_LAYERS)
        id_dtype(self.num_experts)
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(self.num_layers))):
            raise InputError(
                f"dense layers must be different numbers from 0 to {self.num_layers - 1}, in order, not "
                f"{self.dense_layers!r:.80}"
            )
        if not self.moe_layers:
            raise InputError(f"all {self.num_layers} layers are dense: there is no routing to read")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)


def model_from_config(config: Mapping[str, Any]) -> RoutedModel:
    """The model that a Hugging Face configuration describes; the text model if it has several."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    experts = next((name for name in EXPERTS if config.get(name)), EXPERTS[0])
    missing = [name for name in ("num_hidden_layers", "num_experts_per_tok", experts) if config.get(name) is None]
    if missing:
        raise InputError(
            f"the configuration has no {', '.join(missing)}, so it describes no known MoE model; give layers, experts "
            "per token, experts and dense layers instead"
        )
    num_layers: Any = config["num_hidden_layers"]
    check_whole("num_hidden_layers", num_layers, low=1, high=MAX_LAYERS)
    dense = tuple(layer for layer in range(num_layers) if _is_dense(config, layer))
    return RoutedModel(
        num_layers=num_layers, top_k=config["num_experts_per_tok"], num_experts=config[experts], dense_layers=dense
    )


def model_from_folder(path: Path | str) -> RoutedModel:
    """The model that the config.json in a folder describes; no other file is read."""
    file = Path(path) / "config.json"
    config = read_config(file)
    with located(str(file)):
        return model_from_config(config)


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in a config.json of at most 1 MiB."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise cannot("read", file, error) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise InputError(f"cannot read {file}: it is larger than the {MAX_CONFIG_BYTES} bytes allowed")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"cannot read {file}: it must be a JSON object, not a {type(config).__name__}")
    return config


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has no experts, by the rules of transformers' model families."""
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "dense")
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise InputError(f"mlp_only_layers must be a list of layers, not {only!r:.60}")
    names = ("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq")
    first, step, every = (0 if config.get(name) is None else config[name] for name in names)
    for name, value in zip(names, (first, step, every), strict=True):
        check_whole(name, value, low=0, high=MAX_LAYERS)
    return layer < first or layer in only or (layer + 1) % (step or 1) != 0 or layer % (every or 1) != 0
