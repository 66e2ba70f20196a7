"""Loads: how many tokens each expert gets, per sequence and, with a schedule, per micro-batch.

Symbols: S sequences, M micro-batches, L MoE layers, R ranks, E experts. A token routed to k experts counts once for
each of them, so a load is a number of (token, expert) pairs. Imbalance is slowest rank over mean rank: 1.0 is perfect,
R means that one of R ranks has all the load. An all-zero load has imbalance 1.0: no rank waits.

A schedule gives every sequence to a micro-batch and a rank: what pack decides. A step may have several mini-batches,
with an optimizer step after each. The mini-batch of a sequence is given, never decided; a micro-batch belongs to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLoad:
    """The load of each sequence, the unit that pack assigns to micro-batches."""

    tokens_SLE: NDArray[np.int32]
    """[S, L, E] tokens that each expert of each layer gets from each sequence"""
    length_of_sequence: NDArray[np.int64]
    """[S] tokens, including those without recorded routing"""

    def __post_init__(self) -> None:
        tokens, lengths = self.tokens_SLE, self.length_of_sequence
        if tokens.ndim != 3 or 0 in tokens.shape:
            raise InputError(f"sequence loads must be [sequences, layers, experts], all > 0, not {tokens.shape}")
        if tokens.dtype != np.int32:
            raise InputError(f"sequence loads must be int32, not {tokens.dtype}")
        if lengths.shape != tokens.shape[:1]:
            raise InputError(f"{tokens.shape[0]} sequences need one length each, not lengths of shape {lengths.shape}")
        if lengths.min() < 1 or tokens.min() < 0:
            found = f"{lengths.min()} and {tokens.min()}"
            raise InputError(f"lengths must be at least 1 and loads not negative; the smallest are {found}")

    @property
    def num_sequences(self) -> int:
        return int(self.tokens_SLE.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.tokens_SLE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.tokens_SLE.shape[2])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoad:
    """The load of one training step: the input of every planner."""

    tokens_MLER: NDArray[np.int32]
    """[M, L, E, R] tokens of each source rank for each expert, per micro-batch and layer"""

    def __post_init__(self) -> None:
        tokens = self.tokens_MLER
        if tokens.ndim != 4 or 0 in tokens.shape:
            raise InputError(
                f"a step load must be [micro-batches, layers, experts, source ranks], all > 0, not {tokens.shape}"
            )
        if tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
            raise InputError(f"a step load must be a C-contiguous int32 array, not {tokens.dtype} {tokens.strides}")
        if tokens.min() < 0:
            raise InputError(f"loads must not be negative; the smallest is {tokens.min()}")

    @property
    def num_micro_batches(self) -> int:
        return int(self.tokens_MLER.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.tokens_MLER.shape[1])

    @property
    def num_ranks(self) -> int:
        return int(self.tokens_MLER.shape[3])

    @property
    def num_experts(self) -> int:
        return int(self.tokens_MLER.shape[2])

    def expert_load(self) -> NDArray[np.int64]:
        """[M, L, E] tokens of each expert, summed over source ranks."""
        load_MLE: NDArray[np.int64] = self.tokens_MLER.sum(axis=3, dtype=np.int64)
        return load_MLE

    def lower_bound(self) -> NDArray[np.int64]:
        """[L, M] fewest tokens of the slowest rank under any plan: the mean, rounded up."""
        total_ML = self.tokens_MLER.sum(axis=(2, 3), dtype=np.int64)
        return np.ascontiguousarray(-(-total_ML.T // self.num_ranks))


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The micro-batch and rank of every sequence of a step."""

    micro_batch_of_sequence: NDArray[np.int32]
    """[S]"""
    rank_of_sequence: NDArray[np.int32]
    """[S] first of the ranks that hold the sequence's tokens and compute its attention"""
    num_micro_batches: int
    ranks_per_sequence: int = 1
    """adjacent ranks that share each sequence equally (sequence or context parallelism)"""
    mini_batch_of_micro_batch: NDArray[np.int32] | None = None
    """[M] rises from 0 without gaps; None: one mini-batch"""

    def __post_init__(self) -> None:
        micro_batch, rank = self.micro_batch_of_sequence, self.rank_of_sequence
        if micro_batch.ndim != 1 or micro_batch.shape != rank.shape or micro_batch.size == 0:
            shapes = f"{micro_batch.shape} and {rank.shape}"
            raise InputError(f"a schedule needs a micro-batch and a rank per sequence, not shapes {shapes}")
        if micro_batch.min() < 0 or micro_batch.max() >= self.num_micro_batches or rank.min() < 0:
            raise InputError(
                f"micro-batches must be 0 to {self.num_micro_batches - 1}, not {micro_batch.min()} to "
                f"{micro_batch.max()}, and ranks not negative; the smallest is {rank.min()}"
            )
        if self.ranks_per_sequence < 1 or (rank % self.ranks_per_sequence).any():
            raise InputError(f"sequences on {self.ranks_per_sequence} ranks each must start on a multiple of that")
        mini = self.mini_batch_of_micro_batch
        if mini is not None and (
            mini.shape != (self.num_micro_batches,) or mini.dtype.kind not in "iu" or mini[0] != 0
            or not np.isin(np.diff(mini), (0, 1)).all()
        ):  # fmt: skip
            raise InputError(
                f"the mini-batches of {self.num_micro_batches} micro-batches must rise from 0 without gaps, not {mini}"
            )

    @property
    def num_sequences(self) -> int:
        return int(self.micro_batch_of_sequence.size)

    @property
    def num_mini_batches(self) -> int:
        return 1 if self.mini_batch_of_micro_batch is None else int(self.mini_batch_of_micro_batch[-1]) + 1

    @property
    def mini_batch_of_sequence(self) -> NDArray[np.int32]:
        mini = self.mini_batch_of_micro_batch
        return np.zeros(self.num_sequences, np.int32) if mini is None else mini[self.micro_batch_of_sequence]


def check_mini_batches(
    mini_batch_of_sequence: NDArray[np.integer], num_sequences: int, *, complete: bool = True
) -> None:
    """Raise InputError unless every sequence has a mini-batch and, if complete, every mini-batch has a sequence."""
    mini = mini_batch_of_sequence
    required = f"mini-batches of {num_sequences} sequences must be as many whole numbers from 0 on"
    if mini.shape != (num_sequences,) or mini.dtype.kind not in "iu":
        raise InputError(f"{required}, not {mini.dtype} {list(mini.shape)}")
    if mini.min(initial=0) < 0:
        raise InputError(f"{required}, not from {mini.min()} on")
    used = np.unique(mini)
    if complete and used.size and used.size <= used[-1]:
        missing = int(np.argmax(used != np.arange(used.size)))
        raise InputError(
            f"mini-batch {missing} has no sequence on any rank, mini-batch {used[-1]} has: "
            "number mini-batches from 0 without gaps"
        )


def step_load(sequences: SequenceLoad, schedule: Schedule, cluster: Cluster) -> StepLoad:
    """The load of every micro-batch under this schedule."""
    if schedule.num_sequences != sequences.num_sequences:
        raise InputError(f"the schedule has {schedule.num_sequences} sequences, the load {sequences.num_sequences}")
    width = schedule.ranks_per_sequence
    if schedule.rank_of_sequence.max() + width > cluster.num_ranks or cluster.num_ranks % width:
        raise InputError(
            f"the schedule uses rank {schedule.rank_of_sequence.max() + width - 1} and {width} ranks per sequence, "
            f"the cluster has {cluster.num_ranks} ranks"
        )
    cells = cluster.num_ranks // width
    shape = (schedule.num_micro_batches, sequences.num_layers, sequences.num_experts, cells)
    tokens_MLEC = np.zeros(shape, np.int32)
    for s in range(sequences.num_sequences):
        m, cell = schedule.micro_batch_of_sequence[s], schedule.rank_of_sequence[s] // width
        tokens_MLEC[m, :, :, cell] += sequences.tokens_SLE[s]
    return StepLoad(tokens_MLER=tokens_MLEC if width == 1 else _shared(tokens_MLEC, width))


def _shared(tokens_MLEC: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """[M, L, E, R] each cell's tokens split over its ranks in whole numbers; remainders rotate by expert."""
    num_experts, cells = tokens_MLEC.shape[2:]
    tokens_MLER = np.empty((*tokens_MLEC.shape[:3], cells * width), np.int32)
    turn_E = np.arange(num_experts)[:, None]
    for part in range(width):
        extra = ((part - turn_E) % width) < tokens_MLEC % width
        tokens_MLER[..., part::width] = tokens_MLEC // width + extra
    return tokens_MLER


def imbalance(load: NDArray[Any]) -> NDArray[np.float64]:
    """[...] imbalance of loads [..., R]: maximum over mean of the last axis."""
    if load.ndim < 1 or load.shape[-1] < 1:
        raise InputError(f"a load must be [..., ranks] with at least one rank, not {load.shape}")
    if load.size and not (np.isfinite(load).all() and load.min() >= 0):
        raise InputError(f"loads must be finite and not negative, not {load.min()} to {load.max()}")
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.where(mean > 0, load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)


class ImbalanceSpread(NamedTuple):
    """Mean, 99th percentile and maximum over micro-batches and layers."""

    mean: float
    p99: float
    worst: float


def spread(imbalances: NDArray[np.float64]) -> ImbalanceSpread:
    """Mean, 99th percentile and maximum of imbalances."""
    return ImbalanceSpread(float(imbalances.mean()), float(np.percentile(imbalances, 99)), float(imbalances.max()))


def static_imbalance(load: StepLoad) -> float:
    """Slowest over mean rank, mean over layers and micro-batches, with contiguous homes and without copies."""
    load_MLE = load.expert_load()
    return float(imbalance(load_MLE.reshape(*load_MLE.shape[:2], load.num_ranks, -1).sum(axis=3)).mean())
