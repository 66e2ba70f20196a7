"""Weights as a stream of published names, on every rank: what a rollout engine inside the training processes loads.

    for name, value in logical_weights(runtime, naming_of("qwen3-moe"), dense):
        engine.load(name, value)                                        # on all ranks, in step

Dense tensors come first, in their order, then the experts layer by layer in logical order, whatever the placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import BrokenStateError, InputError, StaleError
from equilibra.execute.group import Channel
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.safetensors_names import Naming

__all__ = ["gather_layer", "logical_weights", "room_for_a_layer", "tensors_of_layer"]

WHAT = "streaming weights"


def logical_weights(
    runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor], *, wait: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Tensor]]:
    """Collective, and so is every step of the iteration: each weight by its published name, on every rank.

    dense: everything but experts, by name; the same on every rank. Experts are gathered inside the expert-parallel
    group, one layer at a time: beside the tensor that is handed out a rank holds one layer. Tensors are copies on the
    device of the weights: they stay valid and do not change, and may be kept. All ranks iterate to the end, or stop
    together: a rank that fails leaves the others waiting until the timeout, which is a RankLostError. Weights and homes
    must not change meanwhile.

    wait: called before each layer is gathered; a collective with more patience than the group's, where some ranks do
    more with the tensors than others, as writing them to a disk.
    """
    if runtime.broken is not None:
        raise BrokenStateError(f"cannot stream weights: {runtime.broken}")
    group, layers = runtime.group, range(len(runtime.weights))
    room: list[tuple[Tensor, Tensor]] = []

    def prepare() -> None:
        _check_names(runtime, naming, dense)
        room.append(room_for_a_layer(runtime))

    group.all_succeed(prepare, what=WHAT)
    described = [repr(naming), *(f"{name} {value.dtype} {list(value.shape)}" for name, value in dense.items())]
    group.agree(hashlib.sha256("\n".join(described).encode()).hexdigest()[:32], what="the weights to stream")
    version, placement = runtime.version, runtime.placement
    for name, value in dense.items():
        yield name, value.detach().clone(memory_format=torch.contiguous_format)
    for layer in layers:
        if runtime.version != version or runtime.placement != placement:
            raise StaleError("weights or homes have changed while weights were streamed: stream them between steps")
        wait()
        gather_layer(runtime, layer, room[0])
        yield from tensors_of_layer(runtime, naming, layer, room[0][1])


def _check_names(runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor]) -> None:
    """An error if the naming does not fit the model, or a dense tensor has the name of an expert's."""
    for layer in range(len(runtime.weights)):
        for expert in range(runtime.spec.num_experts):
            for name in naming.names_of_expert(runtime.spec, layer, expert):
                if name in dense:
                    raise InputError(f"two tensors would be called {name}: dense tensors need names of their own")


def room_for_a_layer(runtime: Runtime, *, receives: bool = True) -> tuple[Tensor, Tensor]:
    """Memory [H, P] to send a layer's experts at home, and [E, P] to receive a layer: taken before anything is sent."""
    like, most = runtime.weights[0], max(weights.experts.size for weights in runtime.weights)
    sent, received = (
        torch.empty(number, like.layout.size, dtype=like.dtype, device=like.device)
        for number in (most, runtime.spec.num_experts if receives else 0)
    )
    return sent, received


def gather_layer(runtime: Runtime, layer: int, room: tuple[Tensor, Tensor], *, target: int | None = None) -> None:
    """Collective: all experts of a layer into the room of the target rank, or of every rank, by home and number."""
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
    """Every tensor of a layer that was gathered, by the numbers of experts; made when it is asked for, and a copy."""
    row_of_expert = np.argsort(np.argsort(runtime.placement.home_of_expert[layer], kind="stable")).tolist()
    experts = runtime.weights[layer].layout.experts(rows_EP)
    entries = [naming.entries(runtime.spec, layer, e, experts[row]) for e, row in enumerate(row_of_expert)]
    if naming.stacked:
        for of_name in zip(*entries, strict=True):
            yield of_name[0].name, torch.stack([entry.value.reshape(entry.shape) for entry in of_name])
    else:
        for entry in (entry for of_expert in entries for entry in of_expert):
            yield entry.name, entry.value.reshape(entry.shape).clone()
