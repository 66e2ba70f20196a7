"""A layer's experts from the ranks that are home of them, as tensors by their published names.

Symbols: H homes on this rank, E experts, P values of one expert in flat form.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from equilibra.execute.group import Channel
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.safetensors_names import Naming

__all__ = ["gather_layer", "room_for_a_layer", "tensors_of_layer"]


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
