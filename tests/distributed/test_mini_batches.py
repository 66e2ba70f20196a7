"""Several optimizer steps under one plan equal the same steps in one process, however copies travel."""

import pytest
from tests.distributed.mini_batches import mini_batch_cases, mini_batch_errors
from tests.distributed.ranks import run_ranks

from equilibra.core.cluster import Cluster
from equilibra.execute.copies.transfer import Path

ROUNDING = 1e-9
WORLDS = {
    "2 ranks": (Cluster(num_nodes=1, ranks_per_node=2), 2),
    "2 nodes of 2": (Cluster(num_nodes=2, ranks_per_node=2), 4),
    "2 groups of 2": (Cluster(num_nodes=1, ranks_per_node=2), 4),
}
CASES = {
    "2 ranks": [("equilibra", Path.COLLECTIVE, 3), ("static", Path.HOST, 1), ("random", Path.HOST, 2)],
    "2 nodes of 2": [("equilibra", Path.HOST, 1), ("static", Path.COLLECTIVE, 0), ("random", Path.COLLECTIVE, 5)],
    "2 groups of 2": [("equilibra", Path.COLLECTIVE, 2), ("static", Path.COLLECTIVE, 1), ("random", Path.HOST, 0)],
}
"""planner, path of copies, prefetch depth"""


def seen(results, name):
    return sum(case.seen.get(name, 0) for case in results[0])


@pytest.mark.parametrize("world", WORLDS)
def test_mini_batches_equal_the_reference(world):
    cluster, processes = WORLDS[world]
    results = run_ranks(processes, mini_batch_cases, CASES[world], cluster)
    for rank, cases in enumerate(results):
        for (planner, *_), case in zip(CASES[world], cases, strict=True):
            assert case.worst() < ROUNDING, f"rank {rank}, {planner}: {case}"
    assert seen(results, "mini_batches") > 2 * 3 * len(CASES[world]) - 3
    assert results[0][0].seen["flash"] > 0, "the planner made no copies"
    assert seen(results, "moves") > 0
    if world == "2 groups of 2":
        assert sum(case.seen["empty"] for cases in results for case in cases) > 0, "no group was without a micro-batch"


def test_wrong_mini_batches_are_an_error_on_every_rank():
    cluster, processes = WORLDS["2 ranks"]
    words = [
        "sequences must be as many whole numbers", "not float64", "mini-batch 1 has no sequence on any rank",
        "from -1 on", "begin() it without routing and mini-batches", "there is no mini-batch -1: this step has 0 to 1",
        "there is no mini-batch 2",
    ]  # fmt: skip
    for errors in run_ranks(processes, mini_batch_errors, cluster):
        for text, word in zip(errors, words, strict=False):
            assert text.startswith("InputError"), text
            assert word in text, text
        assert errors[-1] == "" or "0 tensors were given: one for each is needed" in errors[-1]


def test_the_comparison_notices_stale_copies():
    cluster, processes = WORLDS["2 ranks"]
    results = run_ranks(processes, stale_cases, cluster)
    assert max(case.worst() for cases in results for case in cases) > 1e-4


def stale_cases(cluster):
    return mini_batch_cases([("random", Path.COLLECTIVE, 2), ("random", Path.COLLECTIVE, 3)], cluster, 3, stale=True)
