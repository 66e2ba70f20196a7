"""The schedule of a run in which sequences stay where the rollout left them: each rank fills cells with its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import BudgetError
from equilibra.core.load import Schedule

__all__ = ["OwnSchedule", "own_schedule"]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnSchedule:
    """A schedule, and the expert-parallel group that runs each of its micro-batches."""

    schedule: Schedule
    """ranks are those of the expert-parallel group"""
    group_of_micro_batch: NDArray[np.int64]
    """[M]"""


def own_schedule(
    lengths: NDArray[np.int64], rank_of_sequence: NDArray[np.int64], mini_batch_of_sequence: NDArray[np.integer], *,
    num_ranks: int, tokens_per_rank: int,
) -> OwnSchedule:  # fmt: skip
    """Each world rank's sequences of a mini-batch in order, cell after cell.

    Of a mini-batch, a group has as many micro-batches as its fullest rank, so perhaps none.
    """
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, a rank's part of a micro-batch "
            f"{tokens_per_rank}: allow at least {lengths.max()}"
        )
    turn_of_sequence = np.zeros(lengths.size, np.int64)
    turn_of: Counter[tuple[int, int]] = Counter()
    used_of: Counter[tuple[int, int]] = Counter()
    cells = zip(rank_of_sequence.tolist(), mini_batch_of_sequence.tolist(), strict=True)
    for s, (length, cell) in enumerate(zip(lengths.tolist(), cells, strict=True)):
        if used_of[cell] + length > tokens_per_rank:
            turn_of[cell], used_of[cell] = turn_of[cell] + 1, 0
        turn_of_sequence[s] = turn_of[cell]
        used_of[cell] += length
    keys = np.stack([mini_batch_of_sequence, turn_of_sequence, rank_of_sequence // num_ranks])
    keys_of_micro_batch, number = np.unique(keys, axis=1, return_inverse=True)  # by mini-batch, turn, group: no gaps
    return OwnSchedule(
        schedule=Schedule(
            micro_batch_of_sequence=number.ravel().astype(np.int32),
            rank_of_sequence=(rank_of_sequence % num_ranks).astype(np.int32),
            num_micro_batches=keys_of_micro_batch.shape[1],
            mini_batch_of_micro_batch=keys_of_micro_batch[0].astype(np.int32),
        ),
        group_of_micro_batch=keys_of_micro_batch[2],
    )
