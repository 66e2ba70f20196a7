"""Planning problems of the benches: Zipf loads, real routing in file order, small instances with a known optimum."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.exact import exact_makespan
from benchmarks.suite import Setting
from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, imbalance, step_load
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StepPlan
from equilibra.plan.one_layer import balance
from equilibra.trace.count import micro_batches_in_file_order, sequence_loads
from equilibra.trace.open import load_trace

SMALL, MIDDLE, LARGE = 2048, 8192, 32_768
"""tokens of a micro-batch"""


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
    """The folder of recordings: the named one, $EQUILIBRA_TRACES, or None."""
    named = asked or os.environ.get("EQUILIBRA_TRACES")
    if named is None:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} with routing recordings")
    return folder


def sequences_of(setting: Setting, name: str) -> SequenceLoad:
    """Loads of the sequences of a recording."""
    assert setting.traces is not None
    return sequence_loads(load_trace(setting.traces / f"{name}.npz"))


def flash_per_layer(plan: StepPlan) -> float:
    """Flash copies per layer and micro-batch."""
    return plan.stages[Stage.UPDATE].num_copies / plan.num_layers / plan.num_micro_batches


def evenly_spread(count: int, num: int) -> NDArray[np.int64]:
    """Indices of `num` of `count` things, evenly spread."""
    return ((np.arange(num) * 2 + 1) * count // (2 * num)).astype(np.int64)


def static_imbalance(load: StepLoad, num_ranks: int) -> dict[str, float]:
    """Of contiguous homes: over layers and micro-batches, and of all rows that slowest ranks compute together."""
    load_MLE = load.expert_load()
    load_MLR = load_MLE.reshape(*load_MLE.shape[:2], num_ranks, -1).sum(axis=3)
    every = imbalance(load_MLR)
    return {
        "median": float(np.median(every)), "low": float(every.min()), "high": float(every.max()),
        "of_step": float(load_MLR.max(axis=2).sum() / load_MLR.mean(axis=2).sum()),
    }  # fmt: skip


def small_instance(seed: int) -> tuple[NDArray[np.int32], Cluster, int]:
    """Tokens [E, R] of a skewed load, a cluster of 2 to 4 ranks in a node, and 1 or 2 spare slots."""
    generator = np.random.default_rng(seed)
    cluster = Cluster(ranks_per_node=int(generator.integers(2, 5)))
    num_experts = cluster.num_ranks * int(generator.integers(1, 12 // cluster.num_ranks + 1))
    weights = np.exp(generator.uniform(0.3, 2.0) * generator.standard_normal(num_experts))
    total = int(generator.integers(1_000, 20_000))
    load = generator.multinomial(total, weights / weights.sum())
    tokens_ER = generator.multinomial(load, np.full(cluster.num_ranks, 1 / cluster.num_ranks))
    return tokens_ER.astype(np.int32), cluster, int(generator.integers(1, 3))


def over_optimum(num_instances: int) -> list[float]:
    """Slowest rank over the optimum, minus 1, of each instance."""
    over = []
    for seed in range(num_instances):
        tokens_ER, cluster, slots = small_instance(seed)
        home = np.arange(tokens_ER.shape[0], dtype=np.int32) // (tokens_ER.shape[0] // cluster.num_ranks)
        ours = int(balance(tokens_ER, cluster=cluster, spare_slots=slots, tolerance=0.0).rank_load.max())
        best = exact_makespan(tokens_ER.sum(axis=1), home, cluster, slots=slots).makespan
        over.append(ours / best - 1)
    return over
