"""What a model's routing looks like in an engine's reports: how many columns, which of them are dense layers.

Engines keep a column for every decoder layer and write only those of MoE layers, so dense layers are columns of zeros.
Which layers are dense is not in the reports: it comes from the model's config.json, or is given.
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
from equilibra.trace.routing import id_dtype

__all__ = ["RoutedModel", "model_from_config", "model_from_folder"]

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""names that configurations have for the experts of a layer"""
MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """The model that an engine reports about."""

    num_layers: int
    """decoder layers, dense ones too: the columns of a report"""
    top_k: int
    """experts per token"""
    num_experts: int
    """of an MoE layer, shared experts not counted"""
    dense_layers: tuple[int, ...] = ()
    """numbers of the decoder layers that have no experts, in order"""

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k"):
            check_whole(name, getattr(self, name), low=1, high=MAX_LAYERS)
        id_dtype(self.num_experts)
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")
        known = sorted(set(self.dense_layers) & set(range(self.num_layers)))
        if list(self.dense_layers) != known:
            raise InputError(
                f"dense layers must be different numbers from 0 to {self.num_layers - 1}, in order, not "
                f"{self.dense_layers!r:.80}"
            )
        if not self.moe_layers:
            raise InputError(f"all {self.num_layers} layers are dense: there is no routing to read")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that have experts."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)


def model_from_config(config: Mapping[str, Any]) -> RoutedModel:
    """The model that a Hugging Face configuration describes (the text model, where it has several)."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    experts = next((name for name in EXPERTS if config.get(name)), EXPERTS[0])
    missing = [name for name in ("num_hidden_layers", "num_experts_per_tok", experts) if config.get(name) is None]
    if missing:
        raise InputError(
            f"the configuration does not say {', '.join(missing)}, so it is of no MoE model that is known; give "
            "layers, experts per token, experts and dense layers instead"
        )
    num_layers: Any = config["num_hidden_layers"]
    check_whole("num_hidden_layers", num_layers, low=1, high=MAX_LAYERS)
    dense = tuple(layer for layer in range(num_layers) if _is_dense(config, layer))
    return RoutedModel(
        num_layers=num_layers, top_k=config["num_experts_per_tok"], num_experts=config[experts], dense_layers=dense
    )


def model_from_folder(path: Path | str) -> RoutedModel:
    """The model whose config.json is in a folder; nothing else there is looked at."""
    file = Path(path) / "config.json"
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"cannot read {file}: {file.stat().st_size} bytes are too many for a configuration")
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise cannot("read", file, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: it is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"cannot read {file}: it must be a table, not a {type(config).__name__}")
    try:
        return model_from_config(config)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """As the families of transformers decide it."""
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "dense")
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise InputError(f"mlp_only_layers must be a list of layers, not {only!r:.60}")
    first = _whole(config, "first_k_dense_replace") or 0
    step, every = _whole(config, "decoder_sparse_step") or 1, _whole(config, "moe_layer_freq") or 1
    return layer < first or layer in only or (layer + 1) % step != 0 or layer % every != 0


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InputError(f"{name} must be a whole number from 0 on, not {value!r:.60}; give the dense layers instead")
    return value
