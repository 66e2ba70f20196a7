"""transformers models in the disaggregated engine: everything but the experts, and the weights.

Symbols: B sequences, T new tokens (padded), C cached tokens, N tokens without padding, D width, V vocabulary.

Embeddings, norms, attention, routers, rotary embeddings and dense layers are transformers' own modules, so every family
computes what it always does. Only the decoder layer is written out here, because a pass must stop where experts are
called. Experts are not built: they have width 1 in the configuration and are dropped at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.kernels import ExpertParts
from equilibra.integrations.hf.families import moe_layers
from equilibra.integrations.hf.folder import ModelFolder, dense_weights, open_model_folder
from equilibra.rollout.control import Target
from equilibra.rollout.pages import PagedView
from equilibra.rollout.scheduler import Batch
from equilibra.rollout.setting import Pass, PoolModel, Routed


class HFAttention:
    """A transformers model without experts."""

    def __init__(self, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        model = folder.build(dtype, expert_width=1)
        self.blocks = {number: layer.mlp for number, layer in moe_layers(model).items()}
        for block in self.blocks.values():
            if width := folder.spec.shared_ffn:  # the real width of shared experts; the configuration made it 1
                own = type(block.shared_experts)
                block.shared_experts = own(config=folder.config, intermediate_size=width).to(dtype)
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
    def windows(self) -> list[int | None]:  # of every layer
        config = self.folder.config
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        named = {"full_attention": None, "sliding_attention": window, "": window}
        if set(types) - set(named):
            raise InputError(f"layers of type {', '.join(sorted(set(types) - set(named)))} are not supported")
        return [named[kind] for kind in types]

    def forward(self, batch: Batch) -> Pass:
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
        """[B, 1, T, C] cached tokens each new one attends to: true; in eager attention 0, not the lowest number."""
        keys_C = torch.arange(view.longest, device=view.positions_BT.device)
        seen = keys_C <= view.positions_BT[:, :, None]
        if window is not None:
            seen &= keys_C > view.positions_BT[:, :, None] - window
        seen = seen[:, None]
        if not self.eager:
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def embedded_folder() -> ModelFolder:
    """The small model of `equilibra train`."""
    return open_model_folder(Path(str(files("equilibra.train") / "embedded")))


def pool_model(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device, end: int) -> PoolModel:
    """What a `Pool` needs to know of the model in a folder. end: the token that ends an answer."""
    with torch.device("meta"):
        layers = list(moe_layers(folder.build(torch.float32, expert_width=1)))
    if not layers:
        raise InputError(f"the model in {folder.path} has no MoE layers: there are no experts to keep apart")
    if (getattr(folder.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        raise InputError("rope_type dynamic: answers would depend on the longest one beside them; use another engine")
    family = folder.family.model_type
    return PoolModel(
        spec=folder.spec, naming=folder.family.naming_for(layers), num_layers=len(layers),
        vocabulary=folder.config.vocab_size, attention=partial(HFAttention, folder), end=end, dtype=dtype,
        device=device, load=(f"transformers.models.{family}.modeling_{family}", __name__),
    )  # fmt: skip


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
    attention = HFAttention(folder, dtype, torch.device("cpu"))
    for name, (target,) in attention.targets.items():
        yield name, target.view
    spec, naming = folder.spec, folder.family.naming_for(list(attention.blocks))
    layout, std = FlatLayout(spec.part_shapes()), float(getattr(folder.config, "initializer_range", 0.02))
    for layer in range(len(attention.blocks)):
        rows = np.random.default_rng([seed, layer]).normal(scale=std, size=(spec.num_experts, layout.size))
        experts: list[ExpertParts] = layout.experts(torch.from_numpy(rows).to(dtype))
        entries = [naming.entries(spec, layer, number, parts) for number, parts in enumerate(experts)]
        for of_name in zip(*entries, strict=True) if naming.stacked else ():
            yield of_name[0].name, torch.stack([entry.value.reshape(entry.shape) for entry in of_name])
        for entry in () if naming.stacked else (entry for of_expert in entries for entry in of_expert):
            yield entry.name, entry.value.reshape(entry.shape)
