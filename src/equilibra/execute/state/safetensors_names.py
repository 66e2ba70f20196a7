"""Tensor names of MoE layers in the published files of model families, and how they map to our parts.

Symbols: H homes on this rank, E experts, D width, F inner width.

    qwen3-moe, olmoe, deepseek, mixtral     one tensor per expert and matrix: gate [F, D], up [F, D], down [D, F]
    gpt-oss                                 one tensor for all experts, transposed, gate and up interleaved:
                                            gate_up [E, D, 2F], down [E, F, D], and biases [E, 2F], [E, D]

An entry is a view of a parameter with axes in the file's order, so that one list serves writing and reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.kernels.parts import ExpertParts
from equilibra.execute.moe.layer import BalancedMoE

__all__ = ["NAMINGS", "Entry", "Naming", "dense_tensors", "naming_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A tensor in a file, or one expert's row of it."""

    name: str
    """in the file"""
    value: Tensor
    """view with values in the file's order; axes may not be merged yet"""
    shape: tuple[int, ...]
    """in the file, or of the row"""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Name templates of one family, with `{layer}` and `{expert}` for numbers."""

    prefix: str
    """of everything in an MoE layer"""
    gate: str = ""
    """of one expert"""
    up: str = ""
    """of one expert"""
    down: str
    """of one expert, or of all"""
    stacked_gate_up: str = ""
    """of all experts; if set, experts are stacked, transposed and interleaved"""
    stacked_gate_up_bias: str = ""
    """of all experts"""
    stacked_down_bias: str = ""
    """of all experts"""
    router: str
    router_bias: str = ""
    selection_bias: str = ""
    shared: str = ""
    """of the shared expert, with `{matrix}` for gate_proj, up_proj and down_proj"""
    layer_numbers: tuple[int, ...] | None = None
    """model layer of each MoE layer; None: all layers are MoE layers"""

    @property
    def stacked(self) -> bool:
        return bool(self.stacked_gate_up)

    def with_layers(self, numbers: Iterable[int]) -> Naming:
        """For a model in which not every layer is an MoE layer."""
        return replace(self, layer_numbers=tuple(numbers))

    def name(self, template: str, layer: int, what: str, *, expert: int = 0, matrix: str = "") -> str:
        """Name of a tensor of an MoE layer, counted from 0."""
        if not template:
            raise InputError(f"the model has {what}, which this naming has no name for: choose another naming")
        if self.layer_numbers is not None and layer >= len(self.layer_numbers):
            raise InputError(
                f"no model layer for MoE layer {layer}: layer_numbers has {len(self.layer_numbers)} entries"
            )
        number = layer if self.layer_numbers is None else self.layer_numbers[layer]
        return (self.prefix + template).format(layer=number, expert=expert, matrix=matrix)

    def names_of_expert(self, spec: MoESpec, layer: int, expert: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one expert's tensors (or rows, if stacked)."""
        width, inner = spec.hidden, spec.expert_ffn
        named: list[tuple[str, tuple[int, ...]]]
        if self.stacked:
            named = [(self.stacked_gate_up, (width, 2 * inner)), (self.down, (inner, width))]
        else:
            named = [(self.gate, (inner, width)), (self.up, (inner, width)), (self.down, (width, inner))]
        if spec.expert_bias:
            named += [(self.stacked_gate_up_bias, (2 * inner,)), (self.stacked_down_bias, (width,))]
        return {self.name(template, layer, "biases of experts", expert=expert): shape for template, shape in named}

    def entries(self, spec: MoESpec, layer: int, expert: int, parts: ExpertParts) -> list[Entry]:
        gate_up, down, gate_up_bias, down_bias = parts
        halves = gate_up.view(2, spec.expert_ffn, spec.hidden)
        values = [halves.permute(2, 1, 0), down.t()] if self.stacked else [halves[0], halves[1], down]
        if gate_up_bias is not None and down_bias is not None:
            values += [gate_up_bias.view(2, spec.expert_ffn).t(), down_bias]
        named = self.names_of_expert(spec, layer, expert)
        return [
            Entry(name=name, value=value, shape=shape)
            for (name, shape), value in zip(named.items(), values, strict=True)
        ]


_LIKE_QWEN = Naming(
    prefix="model.layers.{layer}.mlp.", gate="experts.{expert}.gate_proj.weight", up="experts.{expert}.up_proj.weight",
    down="experts.{expert}.down_proj.weight", router="gate.weight",
)  # fmt: skip

NAMINGS = {
    "qwen3-moe": _LIKE_QWEN,
    "olmoe": _LIKE_QWEN,
    "deepseek": replace(
        _LIKE_QWEN, selection_bias="gate.e_score_correction_bias", shared="shared_experts.{matrix}.weight"
    ),
    "mixtral": Naming(
        prefix="model.layers.{layer}.block_sparse_moe.", gate="experts.{expert}.w1.weight",
        up="experts.{expert}.w3.weight", down="experts.{expert}.w2.weight", router="gate.weight",
    ),
    "gpt-oss": Naming(
        prefix="model.layers.{layer}.mlp.", stacked_gate_up="experts.gate_up_proj", down="experts.down_proj",
        stacked_gate_up_bias="experts.gate_up_proj_bias", stacked_down_bias="experts.down_proj_bias",
        router="router.weight", router_bias="router.bias",
    ),
}  # fmt: skip


def naming_of(family: str) -> Naming:
    """The naming of a model family."""
    if family not in NAMINGS:
        raise InputError(f"no naming {family!r:.40}: use one of {', '.join(NAMINGS)}, or make a Naming")
    return NAMINGS[family]


def dense_tensors(layers: Iterable[BalancedMoE], naming: Naming) -> dict[str, Tensor]:
    """Views of routers and shared experts by their names in the file, to write or to read into."""
    found: dict[str, Tensor] = {}
    for moe in layers:
        router, layer = moe.router, moe.layer
        found[naming.name(naming.router, layer, "a router")] = router.weight
        if router.bias is not None:
            found[naming.name(naming.router_bias, layer, "a bias of router logits")] = router.bias
        if router.selection_bias is not None:
            found[naming.name(naming.selection_bias, layer, "a bias that chooses experts")] = router.selection_bias
        if moe.shared is not None:
            gate, up = moe.shared.gate_up.weight.chunk(2)
            for matrix, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", moe.shared.down.weight)):
                found[naming.name(naming.shared, layer, "a shared expert", matrix=matrix)] = value
    return found
