"""Lower bounds on the slowest rank of any plan; docs/planner.md has the proofs.

Symbols: L layers, M micro-batches, R ranks, N nodes, G ranks per node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement

__all__ = ["any_plan", "flash_only"]


def any_plan(load: StepLoad) -> NDArray[np.int64]:
    """[L, M] fewest tokens of the slowest rank under any plan: the mean, rounded up."""
    total_ML = load.tokens_MLER.sum(axis=(2, 3), dtype=np.int64)
    return np.ascontiguousarray(-(-total_ML.T // load.num_ranks))


def flash_only(load: StepLoad, placement: Placement, *, spare_slots: int) -> NDArray[np.int64]:
    """[L, M] the same for plans that keep these homes and copy only inside a node.

    Tokens of a node's experts stay on it, so the bound is the mean rank of the fullest node; without slots, the
    fullest rank.
    """
    group = placement.cluster.ranks_per_node
    bins = placement.home_of_expert // group if spare_slots else placement.home_of_expert
    num_bins = placement.cluster.num_nodes if spare_slots else placement.cluster.num_ranks
    num_layers, num_micro_batches = load.num_layers, load.num_micro_batches
    in_bin = np.zeros(num_layers * num_micro_batches * num_bins, np.int64)
    problem_LM1 = np.arange(num_layers * num_micro_batches).reshape(num_layers, num_micro_batches, 1)
    np.add.at(in_bin, problem_LM1 * num_bins + bins[:, None, :], load.expert_load().transpose(1, 0, 2))
    in_bin_LMB = in_bin.reshape(num_layers, num_micro_batches, num_bins)
    slowest: NDArray[np.int64] = in_bin_LMB.max(axis=2)
    return -(-slowest // group) if spare_slots else slowest
