"""Weights as a stream of published names, on every rank: what a rollout engine inside the training processes loads.

    for name, value in logical_weights(runtime, naming_of("qwen3-moe"), dense):
        engine.load(name, value)                                        # on all ranks, in step

Dense tensors come first, in their order, then the experts layer by layer in logical order, whatever the placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from equilibra.core.errors import BrokenStateError, InputError, StaleError
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.gathered import gather_layer, room_for_a_layer, tensors_of_layer
from equilibra.execute.state.safetensors_names import Naming

__all__ = ["logical_weights"]

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
