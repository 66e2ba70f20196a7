"""Splits keep as many tokens on their node as any transport with the same quotas does; on one node, on their rank."""

import numpy as np
import pytest

from equilibra.core.placement import Cluster, contiguous
from equilibra.plan.micro_batch import (
    EXPERT,
    NO_EXCHANGE,
    TARGET,
    CopyCosts,
    balance_micro_batches,
    scratch_for,
)
from equilibra.plan.one_layer import balance
from references.splits import most_kept

CLUSTERS = [Cluster(num_nodes=n, ranks_per_node=g) for n, g in ((1, 2), (1, 4), (2, 2), (2, 3), (3, 2))]


def problem(seed: int, cluster: Cluster) -> np.ndarray:
    """[E, R] tokens: skewed over experts, and each expert's sources skewed too, so that local first matters."""
    rng = np.random.default_rng(seed)
    num_experts = cluster.num_ranks * int(rng.integers(1, 4))
    load = rng.multinomial(int(rng.integers(50, 2000)), rng.dirichlet(np.full(num_experts, 0.4)))
    sources = rng.dirichlet(np.full(cluster.num_ranks, 0.5), size=num_experts)
    return np.stack([rng.multinomial(n, p) for n, p in zip(load, sources, strict=True)]).astype(np.int32)


def check_expert(tokens_R, home, ranks, tokens_QR, group):
    """One expert's split: exactly once, and best of all with these quotas.

    On several nodes even traffic comes before the own rank (test_plan_across.py).
    """
    at_home = tokens_R - tokens_QR.sum(axis=0)
    assert at_home.min() >= 0
    instances = [*ranks, home]
    served = np.vstack([tokens_QR, at_home])  # [Q, R]
    quota = served.sum(axis=1)
    node = np.array(instances) // group
    on_rank = sum(int(served[q, r]) for q, r in enumerate(instances))
    on_node = sum(int(served[q, n * group : (n + 1) * group].sum()) for q, n in enumerate(node))
    if tokens_R.size == group:
        assert on_rank == most_kept(tokens_R, instances, quota, group, what="rank")
    assert on_node == most_kept(tokens_R, instances, quota, group, what="node")


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.num_nodes}x{c.ranks_per_node}")
def test_flash_copies_are_split_local_first(cluster):
    checked = 0
    for seed in range(12):
        tokens = problem(seed, cluster)
        home = np.arange(tokens.shape[0]) // (tokens.shape[0] // cluster.num_ranks)
        done = balance(tokens, cluster=cluster, spare_slots=2, tolerance=0.0)
        load = np.bincount(home, weights=tokens.sum(axis=1), minlength=cluster.num_ranks)
        for f, (e, r) in enumerate(zip(done.expert_of_copy, done.rank_of_copy, strict=True)):
            load[home[e]] -= done.tokens_FR[f].sum()
            load[r] += done.tokens_FR[f].sum()
        assert done.rank_load.tolist() == load.tolist(), "the loads reported are those of the splits"
        assert done.rank_load.sum() == tokens.sum()
        for e in np.unique(done.expert_of_copy):
            copies = done.expert_of_copy == e
            check_expert(
                tokens[e], int(home[e]), done.rank_of_copy[copies], done.tokens_FR[copies], cluster.ranks_per_node
            )
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize("cluster", CLUSTERS[2:], ids=lambda c: f"{c.num_nodes}x{c.ranks_per_node}")
def test_standing_and_flash_copies_of_one_expert_are_split_together(cluster):
    group = cluster.ranks_per_node
    both = 0
    for seed in range(40):
        tokens = problem(seed, cluster)
        num_experts = tokens.shape[0]
        tokens[0] *= 3  # the expert that stands on every other node is hot
        home = contiguous(cluster, num_layers=1, num_experts=num_experts).home_of_expert[0]
        ranks = np.arange(1, cluster.num_nodes) * group + seed % group
        scratch = scratch_for(cluster, home, 2, np.zeros(ranks.size, np.int64), ranks)
        standing = np.zeros((1, ranks.size, cluster.num_ranks), np.int32)
        _, copies, out = balance_micro_batches(
            tokens[None, None], 0, scratch, cluster, 2, CopyCosts(0.0, tries=2), NO_EXCHANGE, standing
        )
        assert not out.base[len(out) :].any(), "rows that the next micro-batch will use must be left at zero"
        of_expert = np.flatnonzero(copies[EXPERT] == 0)
        both += of_expert.size > 0
        check_expert(
            tokens[0].astype(np.int64),
            0,
            [*copies[TARGET, of_expert], *ranks],
            np.vstack([out[of_expert], standing[0]]),
            group,
        )
    assert both >= 5, "the hot expert should have had flash copies beside its standing copies"
