"""A transformers model whose experts are sharded over ranks and executed by a plan; everything dense is on every rank.

The model is built by transformers with experts of width 1, which cost nothing; then every MoE block is replaced by a
`BalancedMoE`. Weights come from safetensors by their published names, or are drawn anew: an expert's numbers depend on
the seed, its layer and its number alone, so any number of ranks starts from the same model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from equilibra.core.errors import InputError
from equilibra.core.placement import Placement, contiguous
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe.layer import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.safetensors import export_safetensors, import_safetensors
from equilibra.execute.state.safetensors_names import Naming, dense_tensors
from equilibra.integrations.hf.folder import ModelFolder, keep_digits

__all__ = ["ShardedModel", "build_model", "count_moe_layers"]


class WithScores(nn.Module):
    """A block of a family whose decoder layers expect scores, too, which nobody looks at."""

    def __init__(self, moe: BalancedMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Hidden states."""
        return self.moe(hidden), None


class ValueHead(nn.Linear):
    """One number per token; starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False)
        nn.init.zeros_(self.weight)


class ShardedModel(nn.Module):
    """Hidden states and logits (or values) of tokens, on several ranks."""

    def __init__(self, model: nn.Module, folder: ModelFolder, runtime: Runtime, layers: list[int]) -> None:
        super().__init__()
        self.model = model
        self.folder, self.runtime = folder, runtime
        self.naming: Naming = folder.family.naming_for(layers)

    @property
    def moe_layers(self) -> list[BalancedMoE]:
        """In order."""
        return [module for module in self.model.modules() if isinstance(module, BalancedMoE)]

    def hidden(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T, D] states behind the last layer; mask is 1 for tokens and 0 for padding behind them."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        state: Tensor = self.model.model(  # type: ignore[operator]
            input_ids=tokens_BT, attention_mask=mask_BT, position_ids=positions, use_cache=False
        ).last_hidden_state
        return state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits, or [N, 1] values."""
        result: Tensor = self.model.lm_head(hidden_ND)  # type: ignore[operator]
        return result

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """All that `head` reads."""
        return list(self.model.lm_head.parameters())  # type: ignore[union-attr]

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        return int(self.folder.config.vocab_size)

    def dense(self) -> dict[str, Tensor]:
        """Everything but experts, by published name."""
        blocks = [id(part) for moe in self.moe_layers for part in (*moe.parameters(), *moe.buffers())]
        found = {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if id(value) not in blocks and not name.endswith("_extra_state")
        }
        if self.folder.config.tie_word_embeddings and "model.embed_tokens.weight" in found:
            found.pop("lm_head.weight", None)
        routers = dense_tensors(self.moe_layers, self.naming)
        return {name: value.detach() for name, value in {**found, **routers}.items()}

    def load(self, path: Path) -> None:
        """Collective: fill with published weights."""
        import_safetensors(path, self.runtime, self.naming, self.dense())

    def load_trunk(self, path: Path) -> None:
        """Collective: published weights but for the head, which is a new one of values."""
        dense = {name: value for name, value in self.dense().items() if not name.startswith("lm_head.")}
        import_safetensors(path, self.runtime, self.naming, dense)

    def save(self, path: Path, files: dict[str, bytes], *, overwrite: bool = False) -> None:
        """Collective: write a folder that transformers loads. files: those of the tokenizer."""
        others = {"config.json": self.folder.config_file(next(self.model.parameters()).dtype), **files}
        export_safetensors(path, self.runtime, self.naming, self.dense(), others=others, overwrite=overwrite)


def count_moe_layers(folder: ModelFolder) -> int:
    """MoE layers of the model that the folder describes."""
    return len(_moe_blocks(_skeleton(folder, torch.float32)))


def build_model(
    folder: ModelFolder, group: ExpertGroup, copies: CopySetting, *, seed: int, dtype: torch.dtype,
    device: torch.device, placement: Placement | None = None, value: bool = False, checkpointing: bool = False,
) -> ShardedModel:  # fmt: skip
    """Collective: a model on all ranks of the group, from the folder's weights or from the seed.

    value: with a head of one number per token. placement: homes to begin with; None: contiguous.
    """
    torch.manual_seed(seed)  # dense parts are drawn by transformers
    model = _skeleton(folder, dtype)
    spec, blocks = folder.spec, _moe_blocks(model)
    if not blocks:
        raise InputError(f"the model in {folder.path} has no MoE layers: there is nothing to balance")
    if placement is None:
        placement = contiguous(group.cluster, num_layers=len(blocks), num_experts=spec.num_experts)
    runtime = Runtime(group, placement, copies)
    for number, layer in blocks.items():
        block = layer.mlp
        moe = BalancedMoE(spec, runtime, device=device, dtype=dtype)
        router = getattr(block, folder.family.router)
        moe.router.load_state_dict(_router_state(router, moe))
        _draw_experts(moe, seed, number, std=float(getattr(folder.config, "initializer_range", 0.02)))
        layer.mlp = WithScores(moe) if folder.family.returns_scores else moe
    if value:
        model.lm_head = ValueHead(spec.hidden).to(dtype)
    model.to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = ShardedModel(model, folder, runtime, list(blocks))
    if folder.has_weights:
        sharded.load_trunk(folder.path) if value else sharded.load(folder.path)
    return sharded


def _skeleton(folder: ModelFolder, dtype: torch.dtype) -> Any:  # noqa: ANN401 - transformers' classes are made at run time
    """The model with experts of no weight, drawn from torch's generator."""
    config = copy.deepcopy(folder.config)
    setattr(config, folder.family.expert_width, 1)
    try:
        made: Any = AutoModelForCausalLM
        model = made.from_config(config, dtype=dtype)
    except Exception as error:  # whatever transformers raises on shapes that do not fit
        raise InputError(f"cannot build the model in {folder.path}: {type(error).__name__}: {error}") from error
    keep_digits(model, dtype)
    return model.train()


def _moe_blocks(model: Any) -> dict[int, Any]:  # noqa: ANN401
    """Decoder layers that have experts, by number."""
    return {number: layer for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}


def _router_state(router: Any, moe: BalancedMoE) -> dict[str, Tensor]:  # noqa: ANN401
    """What transformers drew for the router."""
    state = {"weight": router.weight.detach()}
    if moe.router.bias is not None:
        state["bias"] = router.bias.detach()
    if moe.router.selection_bias is not None:
        state["selection_bias"] = router.e_score_correction_bias.detach()
    return state


@torch.no_grad()
def _draw_experts(moe: BalancedMoE, seed: int, layer: int, *, std: float) -> None:
    for expert, parts in zip(moe.experts.experts.tolist(), moe.experts.homes(), strict=True):
        random = np.random.default_rng([seed, 1, layer, expert])
        for part in (parts.gate_up, parts.down):
            part.copy_(torch.from_numpy(random.normal(scale=std, size=part.shape)))
        for bias in (parts.gate_up_bias, parts.down_bias):
            if bias is not None:
                bias.zero_()
    if moe.shared is not None:
        random = np.random.default_rng([seed, 2, layer])
        for weight in moe.shared.parameters():
            weight.copy_(torch.from_numpy(random.normal(scale=std, size=weight.shape)))
