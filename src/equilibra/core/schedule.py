"""Schedule: which micro-batch and which rank each sequence is given to. What pack decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, StepLoad

__all__ = ["Schedule", "step_load"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A place for every sequence of a step."""

    micro_batch_of_sequence: NDArray[np.int32]
    """[S]"""
    rank_of_sequence: NDArray[np.int32]
    """[S] the rank that holds the sequence's tokens and computes its attention"""
    num_micro_batches: int
    """M"""

    def __post_init__(self) -> None:
        micro_batch, rank = self.micro_batch_of_sequence, self.rank_of_sequence
        if micro_batch.ndim != 1 or micro_batch.shape != rank.shape or micro_batch.size == 0:
            raise InputError(f"a schedule needs as many micro-batches as ranks: {micro_batch.shape}, {rank.shape}")
        if micro_batch.min() < 0 or micro_batch.max() >= self.num_micro_batches or rank.min() < 0:
            raise InputError(
                f"micro-batches must be 0 to {self.num_micro_batches - 1}, not {micro_batch.min()} to "
                f"{micro_batch.max()}, and ranks not negative"
            )

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.micro_batch_of_sequence.size)


def step_load(sequences: SequenceLoad, schedule: Schedule, cluster: Cluster) -> StepLoad:
    """The load of every micro-batch when the sequences run as scheduled."""
    if schedule.num_sequences != sequences.num_sequences:
        raise InputError(f"a schedule of {schedule.num_sequences} sequences for {sequences.num_sequences} of them")
    if schedule.rank_of_sequence.max() >= cluster.num_ranks:
        raise InputError(
            f"the schedule uses rank {schedule.rank_of_sequence.max()}, the cluster has {cluster.num_ranks}"
        )
    shape = (schedule.num_micro_batches, sequences.num_layers, sequences.num_experts, cluster.num_ranks)
    tokens_MLER = np.zeros(shape, np.int32)
    for s in range(sequences.num_sequences):
        m, r = schedule.micro_batch_of_sequence[s], schedule.rank_of_sequence[s]
        tokens_MLER[m, :, :, r] += sequences.tokens_SLE[s]
    return StepLoad(tokens_MLER=tokens_MLER)
