"""Stream all weights by published name on every rank, for a rollout engine inside the training processes.

    for name, value in logical_weights(runtime, naming_of("qwen3-moe"), dense):
        engine.load(name, value)                                        # on all ranks, in step

Dense tensors come first in their order, then experts layer by layer in logical order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import InputError, StaleError
from equilibra.execute.group import Channel
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.safetensors_names import Naming

__all__ = ["gather_layer", "logical_weights", "room_for_a_layer", "tensors_of_layer"]


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
        _check_names(runtime, naming, dense)
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


def _check_names(runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor]) -> None:
    """Raise InputError if the naming does not fit the model, or a dense tensor has an expert's name."""
    for layer in range(len(runtime.weights)):
        for expert in range(runtime.spec.num_experts):
            for name in naming.names_of_expert(runtime.spec, layer, expert):
                if name in dense:
                    raise InputError(f"two tensors would be called {name}: rename the dense tensor")


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
