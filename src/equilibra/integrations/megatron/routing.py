"""Routing of a step's micro-batches, as RouterReplay of Megatron and verl and slime have it, and replay.

Symbols: M micro-batches, L MoE layers of this pipeline stage, T tokens of this rank, K experts per token, E experts.

A step's routing is [M][L] ids [T, K]: for each micro-batch what `RouterReplay.set_replay_data` takes. Rows with a
negative id, or with an expert twice, are routed live and not counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibra.core.errors import InputError

__all__ = ["by_micro_batch", "masked", "set_replay"]


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
    """`[M][L]` from `[L][M]`: slime's `top_indices_list` of all its replays, or Megatron's `replay_backward_list`."""
    of_layers = [list(of_layer) for of_layer in lists]
    counts = {len(of_layer) for of_layer in of_layers}
    if len(counts) > 1:
        raise InputError(
            f"layers have {min(counts)} to {max(counts)} micro-batches: give the lists before the first pass takes "
            "from them"
        )
    return [list(layers) for layers in zip(*of_layers, strict=True)]


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
                "cannot route some rows live: fill them in, or use verl's RouterReplay"
            )
