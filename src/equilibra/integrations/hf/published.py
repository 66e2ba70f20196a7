"""A transformers model's dense tensors by their published names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equilibra.integrations.hf.folder import ModelFolder

__all__ = ["dense_weights"]


def dense_weights(model: Any, folder: ModelFolder, blocks: Mapping[int, Any]) -> dict[str, Tensor]:  # noqa: ANN401
    """Views of everything but experts. blocks: the MoE block of every layer that has one, by layer number."""
    inside = {f"model.layers.{n}.mlp." for n in blocks}
    found: dict[str, Tensor] = {
        name: value for name, value in model.state_dict().items()
        if not any(name.startswith(prefix) for prefix in inside)
    }  # fmt: skip
    if folder.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    naming = folder.family.naming_for(list(blocks))
    for layer, block in enumerate(blocks.values()):
        router = getattr(block, folder.family.router)
        found[naming.name(naming.router, layer, "a router")] = router.weight
        if getattr(router, "bias", None) is not None:
            found[naming.name(naming.router_bias, layer, "a bias")] = router.bias
        if hasattr(router, "e_score_correction_bias"):
            found[naming.name(naming.selection_bias, layer, "a bias")] = router.e_score_correction_bias
        if hasattr(block, "shared_experts"):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                name = naming.name(naming.shared, layer, "a shared expert", matrix=matrix)
                found[name] = getattr(block.shared_experts, matrix).weight
    return found
