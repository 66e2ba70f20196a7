"""Routing of a step's micro-batches, as RouterReplay of Megatron and verl and slime have it: counts, and replay.

Symbols: M micro-batches, L MoE layers of this pipeline stage, T tokens of this rank, K experts per token, E experts.

A step's routing is [M][L] ids [T, K]: for each micro-batch what `RouterReplay.set_replay_data` takes. Rows with a
negative id, or with an expert twice, are routed live and not counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError

__all__ = ["Routing", "by_micro_batch", "count_routing", "masked", "set_replay"]

Routing = Sequence[Sequence[Tensor]]


def masked(ids_TK: Tensor, replayed_T: Tensor | None) -> Tensor:
    """Ids with -1 where a row is routed live: verl's `target_replay_mask` is False there."""
    if replayed_T is None:
        return ids_TK
    if ids_TK.ndim != 2 or replayed_T.numel() != len(ids_TK):
        raise InputError(
            f"ids must be [tokens, k] with a mask of as many tokens, not {tuple(ids_TK.shape)} and "
            f"{tuple(replayed_T.shape)}: give both of one layer and micro-batch"
        )
    return ids_TK.masked_fill(~replayed_T.bool().view(-1, 1), -1)


def by_micro_batch(lists: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    """[M][L] from [L][M]: slime's `top_indices_list` of all its replays, or Megatron's `replay_backward_list`."""
    of_layers = [list(of_layer) for of_layer in lists]
    counts = {len(of_layer) for of_layer in of_layers}
    if len(counts) > 1:
        raise InputError(
            f"layers have {min(counts)} to {max(counts)} micro-batches: give the lists before the first pass takes "
            "from them"
        )
    return [list(layers) for layers in zip(*of_layers, strict=True)]


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
                    f"{ids.dtype} "
                    f"{list(ids.shape)}"
                )
            counts[m, layer] = _count(ids.detach().cpu().numpy(), num_experts)
    return counts


def _count(ids_TK: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    if ids_TK.max(initial=0) >= num_experts:
        raise InputError(f"routing names expert {ids_TK.max()}, the model has {num_experts}")
    ordered = np.sort(ids_TK, axis=1)
    known = (ordered[:, 0] >= 0) & ~(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    counts: NDArray[np.int64] = np.bincount(ids_TK[known].ravel().astype(np.int64), minlength=num_experts)
    return counts


def set_replay(replays: Sequence[Any], layers: Sequence[Tensor]) -> None:
    """Give the routers of a stage one micro-batch to replay. replays: their `router_replay`, Megatron's or verl's.

    verl's routes rows with negative ids live; Megatron's own replays every row, and gets none of them.
    """
    for replay, ids in zip(replays, layers, strict=True):
        live = (ids < 0).any(dim=1)
        if not bool(live.any()):
            replay.set_target_indices(ids.to(torch.int64))
        elif "replay_mask" in inspect.signature(replay.set_target_indices).parameters:
            replay.set_target_indices(ids.clamp(min=0).to(torch.int64), replay_mask=~live)
        else:
            raise InputError(
                f"{int(live.sum())} tokens have no recorded routing, and {type(replay).__name__} of Megatron-Core "
                f"cannot "
                "route some rows live: fill them in, or use verl's RouterReplay"
            )
