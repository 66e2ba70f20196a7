"""Weights under their published names: what model families call them, and a stream of them all.

Symbols: H homes on this rank, E experts, D width, F inner width.

    qwen3-moe, olmoe, deepseek, mixtral     one tensor per expert and matrix: gate [F, D], up [F, D], down [D, F]
    gpt-oss                                 one tensor for all experts, transposed, gate and up interleaved:
                                            gate_up [E, D, 2F], down [E, F, D], and biases [E, 2F], [E, D]

`logical_weights` gives them to a rollout engine inside the training processes, dense tensors first, then experts layer
by layer in logical order:

    for name, value in logical_weights(runtime, naming_of("qwen3-moe"), dense):
        engine.load(name, value)                                        # on all ranks, in step
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import InputError, StaleError
from equilibra.execute.experts import MoESpec
from equilibra.execute.group import Channel
from equilibra.execute.kernels import ExpertParts
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A tensor in a file, or one expert's row of it, as a view of a parameter: to write, or to read into."""

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
        """The naming of a model in which only these layers are MoE layers."""
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


def logical_weights(
    runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor], *, wait: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by its published name, on every rank; the call and each iteration are collective.

    dense: everything but experts, by name; equal on every rank. Experts are gathered one layer at a time within the
    expert-parallel group, so a rank holds one extra layer. Yielded tensors are copies on the weights' device and may be
    kept. All ranks must iterate to the end or stop together, else the others raise RankLostError after the timeout.
    Weights and homes must not change meanwhile.

    wait: called before each layer is gathered: a collective with a longer timeout, where some ranks do more with the
    tensors than others, such as writing to disk.
    """
    runtime.check_whole("stream weights")
    group, layers = runtime.group, range(len(runtime.weights))

    def prepare() -> tuple[Tensor, Tensor]:
        spec = runtime.spec
        for layer in layers:
            for expert in range(spec.num_experts):
                twice = next((name for name in naming.names_of_expert(spec, layer, expert) if name in dense), None)
                if twice is not None:
                    raise InputError(f"two tensors would be called {twice}: rename the dense tensor")
        return room_for_a_layer(runtime)

    room = group.all_succeed(prepare, what="streaming weights")
    described = [repr(naming), *(f"{name} {value.dtype} {list(value.shape)}" for name, value in dense.items())]
    group.agree(hashlib.sha256("\n".join(described).encode()).hexdigest()[:32], what="the weights to stream")
    version, placement = runtime.version, runtime.placement
    for name, value in dense.items():
        yield name, value.detach().clone(memory_format=torch.contiguous_format)
    for layer in layers:
        if runtime.version != version or runtime.placement != placement:
            raise StaleError("weights or homes have changed during the stream: stream weights between steps")
        wait()
        gather_layer(runtime, layer, room)
        yield from tensors_of_layer(runtime, naming, layer, room[1])


def room_for_a_layer(runtime: Runtime, *, receives: bool = True) -> tuple[Tensor, Tensor]:
    """Buffers [H, P] to send a layer's home experts and [E, P] to receive a layer, allocated before any exchange."""
    like, most = runtime.weights[0], max(weights.experts.size for weights in runtime.weights)
    sent, received = (
        torch.empty(number, like.layout.size, dtype=like.dtype, device=like.device)
        for number in (most, runtime.spec.num_experts if receives else 0)
    )
    return sent, received


def gather_layer(runtime: Runtime, layer: int, room: tuple[Tensor, Tensor], *, target: int | None = None) -> None:
    """Collective: gather a layer's experts into the buffer of `target`, or of every rank, by home and number."""
    group, weights, home = runtime.group, runtime.weights[layer], runtime.placement.home_of_expert[layer]
    rows = room[0][: weights.experts.size]
    for row, expert in enumerate(weights.experts.tolist()):
        weights.write_flat(expert, rows[row])
    what = f"gathering the experts of MoE layer {layer}"
    if target is None:
        group.all_gather(Channel.STANDING, rows, room[1], what=what).wait()
        return
    here = group.rank == target
    received = np.bincount(home, minlength=group.num_ranks).tolist() if here else [0] * group.num_ranks
    sent = [len(rows) if rank == target else 0 for rank in range(group.num_ranks)]
    group.all_to_all(Channel.STANDING, rows, sent, room[1][: sum(received)], received, what=what).wait()


def tensors_of_layer(runtime: Runtime, naming: Naming, layer: int, rows_EP: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of a gathered layer's tensors by expert number."""
    row_of_expert = np.argsort(np.argsort(runtime.placement.home_of_expert[layer], kind="stable")).tolist()
    experts = runtime.weights[layer].layout.experts(rows_EP)
    entries = [naming.entries(runtime.spec, layer, e, experts[row]) for e, row in enumerate(row_of_expert)]
    if naming.stacked:
        for of_name in zip(*entries, strict=True):
            yield of_name[0].name, torch.stack([entry.value.reshape(entry.shape) for entry in of_name])
    else:
        for entry in (entry for of_expert in entries for entry in of_expert):
            yield entry.name, entry.value.reshape(entry.shape).clone()
