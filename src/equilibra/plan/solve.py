"""Solve many problems of one layer and micro-batch, and time each.

Symbols: P problems, E experts, R source ranks. What is timed is the compiled call that a runtime makes. Each pass goes
over all problems, so none finds its own data in the nearest cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import imbalance
from equilibra.core.placement import Cluster, contiguous
from equilibra.plan.micro_batch import NO_EXCHANGE, CopyCosts, balance, balance_micro_batches, scratch_for


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """What P problems' solutions reach and take."""

    imbalance_before: NDArray[np.float64]
    """[P] with contiguous homes and no copies"""
    imbalance_after: NDArray[np.float64]
    """[P]"""
    lower_bound: NDArray[np.float64]
    """[P] imbalance below which no flash copies can bring it"""
    copies: NDArray[np.int64]
    """[P] flash copies"""
    largest_fan_out: NDArray[np.int64]
    """[P] most copies that one rank sends"""
    solve_us: NDArray[np.float64]
    """[passes, P]"""


def over_sources(load_PE: NDArray[np.integer], num_ranks: int) -> NDArray[np.int32]:
    """[P, E, R] tokens of every expert, split as evenly over source ranks as whole numbers allow."""
    share, rest = np.divmod(load_PE.astype(np.int64), num_ranks)
    turn = np.arange(load_PE.shape[1])[:, None]  # the odd tokens of different experts go to different ranks
    extra = (np.arange(num_ranks) - turn) % num_ranks < rest[:, :, None]
    return (share[:, :, None] + extra).astype(np.int32)


def solve_problems(
    tokens_PER: NDArray[np.int32] | Sequence[NDArray[np.int32]],
    *,
    cluster: Cluster,
    spare_slots: int,
    tolerance: float,
    passes: int = 3,
) -> Solved:
    """Solve and time problems with contiguous homes."""
    num_ranks, group, num_problems = cluster.num_ranks, cluster.ranks_per_node, len(tokens_PER)
    home = contiguous(cluster, num_layers=1, num_experts=tokens_PER[0].shape[0]).home_of_expert[0]
    before, after = np.zeros((2, num_problems, num_ranks), np.int64)
    num_copies, fan_out = np.zeros((2, num_problems), np.int64)
    for p, tokens_ER in enumerate(tokens_PER):
        done = balance(tokens_ER, cluster=cluster, spare_slots=spare_slots, tolerance=tolerance)
        before[p] = tokens_ER.sum(axis=1, dtype=np.int64).reshape(num_ranks, -1).sum(axis=1)
        after[p] = done.rank_load
        num_copies[p] = done.expert_of_copy.size
        fan_out[p] = np.bincount(home[done.expert_of_copy], minlength=1).max()
    spare_slots = min(spare_slots, home.size)  # as in `balance`
    scratch, costs = scratch_for(cluster, home, spare_slots), CopyCosts(tolerance)
    standing = np.zeros((1, 0, num_ranks), np.int32)
    solve_us = np.zeros((passes, num_problems))
    for one_pass in solve_us:
        for p, tokens_ER in enumerate(tokens_PER):
            start = perf_counter_ns()
            balance_micro_batches(tokens_ER[None, None], 0, scratch, cluster, spare_slots, costs, NO_EXCHANGE, standing)
            one_pass[p] = (perf_counter_ns() - start) / 1000
    node_load = before.reshape(num_problems, cluster.num_nodes, group).sum(axis=2)
    bound = -(-node_load.max(axis=1) // group) if spare_slots else before.max(axis=1)
    mean = np.maximum(before.sum(axis=1) / num_ranks, 1e-300)
    return Solved(
        imbalance_before=imbalance(before),
        imbalance_after=imbalance(after),
        lower_bound=np.where(before.sum(axis=1) > 0, bound / mean, 1.0),
        copies=num_copies,
        largest_fan_out=fan_out,
        solve_us=solve_us,
    )
