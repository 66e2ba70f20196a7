"""The problems of the planner bench: Zipf loads of a given start imbalance, and real routing in file order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.core.schedule import Schedule, step_load
from equilibra.trace.count import micro_batches_in_file_order

__all__ = ["file_order_load", "traces_folder", "zipf_loads"]


def zipf_loads(
    *, num_ranks: int, num_experts: int, start: float, seed: int, tokens_per_rank: int = 8192, top_k: int = 8
) -> NDArray[np.int64]:
    """[E] loads drawn from a Zipf law over shuffled experts whose exponent gives contiguous homes this imbalance."""
    if not 1 <= start < num_ranks:
        raise InputError(f"a start imbalance must be from 1 to below {num_ranks} ranks, not {start}")
    generator = np.random.default_rng(seed)
    place = generator.permutation(num_experts)
    low, high = 0.0, 20.0
    for _ in range(60):
        exponent = (low + high) / 2
        weights = (1.0 + place) ** -exponent
        by_rank = weights.reshape(num_ranks, -1).sum(axis=1)
        low, high = (exponent, high) if by_rank.max() / by_rank.mean() < start else (low, exponent)
    return generator.multinomial(tokens_per_rank * num_ranks * top_k, weights / weights.sum()).astype(np.int64)


def file_order_load(sequences: SequenceLoad, cluster: Cluster, tokens_per_microbatch: int) -> StepLoad:
    """Micro-batches of whole sequences in file order; inside one, sequences go to ranks in order, by tokens."""
    lengths = sequences.length_of_sequence
    offsets = micro_batches_in_file_order(lengths, tokens_per_microbatch)
    micro_batch = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    begin = starts[offsets[:-1]][micro_batch]
    total = np.add.reduceat(lengths, offsets[:-1])[micro_batch]
    middle = starts + lengths // 2 - begin
    rank = np.minimum(middle * cluster.num_ranks // total, cluster.num_ranks - 1)
    schedule = Schedule(
        micro_batch_of_sequence=micro_batch.astype(np.int32),
        rank_of_sequence=rank.astype(np.int32),
        num_micro_batches=int(offsets.size - 1),
    )
    return step_load(sequences, schedule, cluster)


def traces_folder(asked: str | None = None) -> Path | None:
    """The folder of recordings: the one asked for, $EQUILIBRA_TRACES, or None."""
    named = asked or os.environ.get("EQUILIBRA_TRACES")
    if named is None:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} with routing recordings")
    return folder
