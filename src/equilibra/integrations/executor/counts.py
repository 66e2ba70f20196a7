"""Counts of a step's routing: what ranks tell each other. Ids stay where they are.

Symbols: M micro-batches, L MoE layers, T tokens of this rank, K experts per token, E experts, R ranks, G groups.

A step's routing is [M][L] ids [T, K]. Rows with a negative id, or an expert twice, are routed live and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.execute.group import ExpertGroup

__all__ = ["Routing", "count_routing", "gather_load"]

Routing = Sequence[Sequence[Tensor]]


def gather_load(group: ExpertGroup, routing: Routing, *, num_layers: int, num_experts: int, top_k: int) -> StepLoad:
    """Collective: the load of all ranks, groups one after another.

    Ranks without MoE layers (a dense pipeline stage) have one without tokens, so that they plan like the others.
    """
    counts: list[NDArray[np.int32]] = []

    def count() -> None:
        counts.append(count_routing(routing, num_layers=num_layers, num_experts=num_experts, top_k=top_k))
        if not num_layers:
            counts[0] = np.zeros((max(1, len(routing)), 1, num_experts), np.int32)
        elif not len(routing):
            raise InputError("there is nothing to plan: no micro-batches")

    group.all_succeed(count, what="comparing routing with the model")
    group.agree(f"{len(routing)}", what="the number of micro-batches")
    every = np.stack(group.gather(counts[0], what="gathering counts of routing"))
    tokens_GMLER = every.reshape(group.num_groups, group.num_ranks, *counts[0].shape).transpose(0, 2, 3, 4, 1)
    return StepLoad(tokens_MLER=np.ascontiguousarray(tokens_GMLER.reshape(-1, *tokens_GMLER.shape[2:]), np.int32))


def count_routing(routing: Routing, *, num_layers: int, num_experts: int, top_k: int) -> NDArray[np.int32]:
    """[M, L, E] pairs of this rank; an error if the routing is of another model."""
    counts = np.zeros((len(routing), num_layers, num_experts), np.int32)
    for m, layers in enumerate(routing):
        if len(layers) != num_layers:
            raise InputError(
                f"micro-batch {m} has routing of {len(layers)} layers, this pipeline stage has {num_layers} MoE layers"
            )
        for layer, ids in enumerate(layers):
            if ids.ndim != 2 or ids.shape[1] != top_k or ids.is_floating_point():
                raise InputError(
                    f"routing of micro-batch {m}, layer {layer} must be whole numbers [tokens, {top_k}], not "
                    f"{ids.dtype} {list(ids.shape)}"
                )
        if num_layers:
            counts[m] = _counts(layers, num_experts)
    return counts


def _counts(layers: Sequence[Tensor], num_experts: int) -> NDArray[np.int64]:
    """[L, E] of a micro-batch, counted where its ids are and brought over at once."""
    counted = torch.stack([_count(ids.detach().long(), num_experts) for ids in layers]).cpu().numpy()
    if counted[:, -1].max() >= num_experts:
        raise InputError(f"routing names expert {counted[:, -1].max()}, the model has {num_experts}")
    result: NDArray[np.int64] = counted[:, :num_experts]
    return result


def _count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """[E + 2] pairs of every expert, those of rows that are routed live, and the largest id."""
    ordered = ids_TK.sort(dim=1).values
    live = (ordered[:, :1] < 0).any(dim=1) | (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    at = ids_TK.masked_fill(live[:, None], num_experts).clamp(0, num_experts).flatten()
    counts = at.new_zeros(num_experts + 2).scatter_add_(0, at, torch.ones_like(at))
    counts[-1] = ids_TK.amax() if ids_TK.numel() else -1
    return counts
