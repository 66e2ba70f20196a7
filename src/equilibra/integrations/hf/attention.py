"""The attention side of a transformers model for the disaggregated engine: everything but the experts.

Symbols: B sequences, T new tokens (padded), C cached tokens, N tokens without padding, D width, V vocabulary.

Embeddings, norms, attention, routers, rotary embeddings and dense layers are transformers' own modules, so every family
computes what it always does. Only the decoder layer is written out here, because a pass must stop where experts are
called. Experts are not built: they have width 1 in the configuration and are dropped at once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.integrations.hf.families import moe_layers
from equilibra.integrations.hf.folder import ModelFolder
from equilibra.integrations.hf.published import dense_weights
from equilibra.rollout.control import Target
from equilibra.rollout.pages import PagedView
from equilibra.rollout.scheduler import Batch
from equilibra.rollout.setting import Pass, Routed

__all__ = ["HFAttention", "build_attention"]


def build_attention(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> HFAttention:
    """The attention side of the model in a folder; with `partial`, what `PoolModel.attention` needs."""
    return HFAttention(folder, dtype, device)


class HFAttention:
    """A transformers model without experts."""

    def __init__(self, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        model = folder.build(dtype, expert_width=1)
        self.blocks = {number: layer.mlp for number, layer in moe_layers(model).items()}
        if folder.spec.shared_ffn:
            _rebuild_shared(folder, self.blocks, dtype)
        for block in self.blocks.values():
            block.experts = nn.Identity()
        self.model: Any = model.to(device).eval().requires_grad_(requires_grad=False)
        self.targets = {
            name: [Target(view=value, shape=tuple(value.shape))]
            for name, value in dense_weights(self.model, folder, self.blocks).items()
        }
        self.eager = model.config._attn_implementation != "sdpa"  # noqa: SLF001 - transformers' own name for it
        if self.eager:
            model.set_attn_implementation("eager")

    @cached_property
    def windows(self) -> list[int | None]:
        """Sliding window of every layer."""
        config = self.folder.config
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        named = {"full_attention": None, "sliding_attention": window, "": window}
        if set(types) - set(named):
            raise InputError(f"layers of type {', '.join(sorted(set(types) - set(named)))} are not supported")
        return [named[kind] for kind in types]

    def forward(self, batch: Batch) -> Pass:
        """Process a batch's tokens."""
        model, view, at = self.model.model, batch.cache, 0
        hidden_BTD: Tensor = model.embed_tokens(batch.tokens_BT)
        rotary = model.rotary_emb(hidden_BTD, view.positions_BT)
        masks = {window: self._mask(view, window, hidden_BTD.dtype) for window in set(self.windows)}
        for number, layer in enumerate(model.layers):
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden_BTD), position_embeddings=rotary,
                attention_mask=masks[self.windows[number]], position_ids=view.positions_BT, past_key_values=view,
            )  # fmt: skip
            hidden_BTD = hidden_BTD + attended
            normed_BTD = layer.post_attention_layernorm(hidden_BTD)
            if number in self.blocks:
                tokens_ND = normed_BTD.flatten(0, 1).index_select(0, view.new_N)
                _, weights, experts = getattr(layer.mlp, self.folder.family.router)(tokens_ND)
                result_ND = yield Routed(at, tokens_ND, experts, weights)
                if hasattr(layer.mlp, "shared_experts"):
                    result_ND = result_ND + layer.mlp.shared_experts(tokens_ND)
                hidden_BTD = hidden_BTD + result_ND.index_select(0, view.row_BT).view_as(hidden_BTD)
                at += 1
            else:
                hidden_BTD = hidden_BTD + layer.mlp(normed_BTD)
        last_BD = hidden_BTD.flatten(0, 1).index_select(0, view.last_B)
        logits_BV: Tensor = self.model.lm_head(model.norm(last_BD))
        return logits_BV

    def _mask(self, view: PagedView, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, T, C] which cached tokens each new one attends to: true, or 0 instead of the lowest number."""
        keys_C = torch.arange(view.longest, device=view.positions_BT.device)
        seen = keys_C <= view.positions_BT[:, :, None]
        if window is not None:
            seen &= keys_C > view.positions_BT[:, :, None] - window
        seen = seen[:, None]
        if not self.eager:
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _rebuild_shared(folder: ModelFolder, blocks: dict[int, Any], dtype: torch.dtype) -> None:
    """Shared experts of their real width; the configuration's width for experts is theirs too."""
    for block in blocks.values():
        own = type(block.shared_experts)
        block.shared_experts = own(config=folder.config, intermediate_size=folder.spec.shared_ffn).to(dtype)
