"""A transformers model whose experts are sharded over ranks and run under a plan; dense parts are on every rank.

transformers builds the model with experts of width 1, which cost nothing; then a `BalancedMoE` replaces every MoE
block. Weights come from safetensors by their published names, or are random: an expert's weights depend only on the
seed, its layer and its number, so any number of ranks starts from the same model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.placement import Placement, contiguous
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.published import Naming, dense_tensors
from equilibra.execute.state.safetensors import export_safetensors, import_safetensors
from equilibra.integrations.hf.families import moe_layers
from equilibra.integrations.hf.folder import ModelFolder

ROUTER = {"selection_bias": "e_score_correction_bias"}
"""transformers' names of a router's tensors, where they are not ours"""


class _WithScores(nn.Module):
    """An MoE block for families whose decoder layers expect scores as a second value; they ignore it."""

    def __init__(self, moe: BalancedMoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.moe(hidden), None


class ShardedModel(nn.Module):
    """Computes hidden states, and logits or values from them, with experts on several ranks."""

    def __init__(self, model: nn.Module, folder: ModelFolder, runtime: Runtime, layers: list[int]) -> None:
        super().__init__()
        self.model = model
        self.folder, self.runtime = folder, runtime
        self.naming: Naming = folder.family.naming_for(layers)

    @property
    def moe_layers(self) -> list[BalancedMoE]:
        return [module for module in self.model.modules() if isinstance(module, BalancedMoE)]

    def hidden(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T, D] hidden states after the last layer. mask: 1 for tokens, 0 for padding on the right."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        state: Tensor = self.model.model(  # type: ignore[operator]
            input_ids=tokens_BT, attention_mask=mask_BT, position_ids=positions, use_cache=False
        ).last_hidden_state
        return state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits; [N, 1] values of a value model."""
        result: Tensor = self.model.lm_head(hidden_ND)  # type: ignore[operator]
        return result

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.lm_head.parameters())  # type: ignore[union-attr]

    @property
    def vocabulary(self) -> int:
        return int(self.folder.config.vocab_size)

    def dense(self) -> dict[str, Tensor]:
        """All tensors but experts, by published name."""
        in_blocks = {id(part) for moe in self.moe_layers for part in (*moe.parameters(), *moe.buffers())}
        found = {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if id(value) not in in_blocks and not name.endswith("_extra_state")
        }
        if self.folder.config.tie_word_embeddings and "model.embed_tokens.weight" in found:
            found.pop("lm_head.weight", None)
        routers = dense_tensors(self.moe_layers, self.naming)
        return {name: value.detach() for name, value in {**found, **routers}.items()}

    def load(self, path: Path, *, head: bool = True) -> None:
        """Collective: load published weights. head: False for a value model."""
        dense = {name: value for name, value in self.dense().items() if head or not name.startswith("lm_head.")}
        import_safetensors(path, self.runtime, self.naming, dense)

    def save(self, path: Path, files: dict[str, bytes], *, overwrite: bool = False) -> None:
        """Collective: write a folder that transformers can load. files: the tokenizer's."""
        others = {"config.json": self.folder.config_file(next(self.model.parameters()).dtype), **files}
        export_safetensors(path, self.runtime, self.naming, self.dense(), others=others, overwrite=overwrite)


def build_model(
    folder: ModelFolder, group: ExpertGroup, copies: CopySetting, *, seed: int, dtype: torch.dtype,
    device: torch.device, placement: Placement | None = None, value: bool = False, checkpointing: bool = False,
) -> ShardedModel:  # fmt: skip
    """Collective: the model on all ranks of the group, from the folder's weights or from the seed.

    value: replace the LM head by a value head that starts at zero. placement: initial homes; None: contiguous.
    """
    torch.manual_seed(seed)  # transformers draws the dense parts
    model = folder.build(dtype, expert_width=1).train()
    spec, layers = folder.spec, moe_layers(model)
    if not layers:
        raise InputError(f"the model in {folder.path} has no MoE layers: there is nothing to balance")
    if placement is None:
        placement = contiguous(group.cluster, num_layers=len(layers), num_experts=spec.num_experts)
    runtime = Runtime(group, placement, copies)
    for number, layer in layers.items():
        moe = BalancedMoE(spec, runtime, device=device, dtype=dtype)
        router, wanted = getattr(layer.mlp, folder.family.router), moe.router.state_dict()
        moe.router.load_state_dict({name: getattr(router, ROUTER.get(name, name)).detach() for name in wanted})
        _draw_experts(moe, seed, number, std=float(getattr(folder.config, "initializer_range", 0.02)))
        layer.mlp = _WithScores(moe) if folder.family.returns_scores else moe
    if value:
        model.lm_head = nn.Linear(spec.hidden, 1, bias=False).to(dtype)
        nn.init.zeros_(model.lm_head.weight)
    model.to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = ShardedModel(model, folder, runtime, list(layers))
    if folder.has_weights:
        sharded.load(folder.path, head=not value)
    return sharded


@torch.no_grad()
def _draw_experts(moe: BalancedMoE, seed: int, layer: int, *, std: float) -> None:
    for expert, parts in zip(moe.experts.experts.tolist(), moe.experts.homes(), strict=True):
        random = np.random.default_rng([seed, 1, layer, expert])
        for part, bias in ((parts.gate_up, parts.gate_up_bias), (parts.down, parts.down_bias)):
            part.copy_(torch.from_numpy(random.normal(scale=std, size=part.shape)))
            if bias is not None:
                bias.zero_()
    if moe.shared is not None:
        random = np.random.default_rng([seed, 2, layer])
        for weight in moe.shared.parameters():
            weight.copy_(torch.from_numpy(random.normal(scale=std, size=weight.shape)))
