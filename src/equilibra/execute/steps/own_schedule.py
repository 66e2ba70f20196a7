"""The schedule of a run in which sequences stay where the rollout left them: each rank fills cells with its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import BudgetError
from equilibra.core.schedule import Schedule

__all__ = ["OwnSchedule", "own_schedule"]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnSchedule:
    """A schedule, and the expert-parallel group that runs each of its micro-batches."""

    schedule: Schedule
    """ranks are those of the expert-parallel group"""
    group_of_micro_batch: NDArray[np.int64]
    """[M]"""


def own_schedule(
    lengths: NDArray[np.int64], rank_of_sequence: NDArray[np.int64], *, num_ranks: int, tokens_per_rank: int
) -> OwnSchedule:
    """Each world rank's sequences in order, cell after cell; a group has as many micro-batches as its fullest rank."""
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, a rank's part of a micro-batch "
            f"{tokens_per_rank}: allow at least {lengths.max()}"
        )
    turn_of_sequence = np.zeros(lengths.size, np.int64)
    turn, used, last = 0, 0, -1
    for s, (length, rank) in enumerate(zip(lengths.tolist(), rank_of_sequence.tolist(), strict=True)):
        if rank != last:
            turn, used, last = 0, 0, rank
        elif used + length > tokens_per_rank:
            turn, used = turn + 1, 0
        turn_of_sequence[s] = turn
        used += length
    group_of_sequence = rank_of_sequence // num_ranks
    turns = np.unique(np.stack([turn_of_sequence, group_of_sequence]), axis=1)  # by turn, then group: no gaps
    number = {(turn, group): m for m, (turn, group) in enumerate(turns.T.tolist())}
    pairs = zip(turn_of_sequence.tolist(), group_of_sequence.tolist(), strict=True)
    return OwnSchedule(
        schedule=Schedule(
            micro_batch_of_sequence=np.array([number[pair] for pair in pairs], np.int32),
            rank_of_sequence=(rank_of_sequence % num_ranks).astype(np.int32),
            num_micro_batches=len(number),
        ),
        group_of_micro_batch=turns[1],
    )
