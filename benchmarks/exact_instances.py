"""Small random instances solved by the planner and by HiGHS: how far above the optimum is the slowest rank?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.plan.exact import exact_makespan
from equilibra.plan.micro_batch import balance

__all__ = ["compare", "instance"]


def instance(seed: int) -> tuple[NDArray[np.int32], Cluster, int]:
    """Tokens [E, R] of a skewed load, a cluster of 2 to 4 ranks in a node, and 1 or 2 spare slots."""
    generator = np.random.default_rng(seed)
    cluster = Cluster(ranks_per_node=int(generator.integers(2, 5)))
    num_experts = cluster.num_ranks * int(generator.integers(1, 12 // cluster.num_ranks + 1))
    weights = np.exp(generator.uniform(0.3, 2.0) * generator.standard_normal(num_experts))
    total = int(generator.integers(1_000, 20_000))
    load = generator.multinomial(total, weights / weights.sum())
    tokens_ER = generator.multinomial(load, np.full(cluster.num_ranks, 1 / cluster.num_ranks))
    return tokens_ER.astype(np.int32), cluster, int(generator.integers(1, 3))


def compare(num_instances: int) -> list[float]:
    """Slowest rank over the optimum, less 1, of each instance."""
    over = []
    for seed in range(num_instances):
        tokens_ER, cluster, slots = instance(seed)
        home = np.arange(tokens_ER.shape[0], dtype=np.int32) // (tokens_ER.shape[0] // cluster.num_ranks)
        ours = int(balance(tokens_ER, cluster=cluster, spare_slots=slots, tolerance=0.0).rank_load.max())
        best = exact_makespan(tokens_ER.sum(axis=1), home, cluster, slots=slots).makespan
        over.append(ours / best - 1)
    return over
