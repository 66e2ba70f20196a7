"""Mini-batches: a schedule of each by itself, one after another.

Which sequences an optimizer step learns from is part of the training recipe. It must not depend on the planner or on
the number of ranks, so packing moves sequences inside a mini-batch only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import SequenceLoad
from equilibra.core.schedule import Schedule

__all__ = ["joined", "turn_in_mini_batch"]


def joined(
    sequences: SequenceLoad,
    mini_batch_of_sequence: NDArray[np.integer],
    schedule_of: Callable[[SequenceLoad], Schedule],
) -> Schedule:
    """The schedules of all mini-batches as one: micro-batches of mini-batch 0 first, then 1, ...

    Micro-batches without sequences are left out: a mini-batch may have fewer sequences than there are groups.
    """
    micro_batch, rank = np.zeros((2, sequences.num_sequences), np.int32)
    width = 1
    num_of_mini_batch: list[int] = []
    for mini_batch in range(int(mini_batch_of_sequence.max()) + 1):
        chosen = np.flatnonzero(mini_batch_of_sequence == mini_batch)
        part = schedule_of(
            SequenceLoad(
                tokens_SLE=sequences.tokens_SLE[chosen], length_of_sequence=sequences.length_of_sequence[chosen]
            )
        )
        used, number = np.unique(part.micro_batch_of_sequence, return_inverse=True)
        micro_batch[chosen] = sum(num_of_mini_batch) + number
        rank[chosen] = part.rank_of_sequence
        width = part.ranks_per_sequence
        num_of_mini_batch.append(used.size)
    return Schedule(
        micro_batch_of_sequence=micro_batch,
        rank_of_sequence=rank,
        num_micro_batches=sum(num_of_mini_batch),
        ranks_per_sequence=width,
        mini_batch_of_micro_batch=np.repeat(np.arange(len(num_of_mini_batch), dtype=np.int32), num_of_mini_batch),
    )


def turn_in_mini_batch(schedule: Schedule) -> NDArray[np.int64]:
    """[M] the place of every micro-batch in its mini-batch."""
    number = np.arange(schedule.num_micro_batches)
    mini = schedule.mini_batch_of_micro_batch
    return number if mini is None else number - np.searchsorted(mini, mini)
