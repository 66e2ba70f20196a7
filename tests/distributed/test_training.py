"""Training under random plans equals training in one process: outputs, every gradient, norms, weights after steps."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.training import train_cases

from equilibra.core.placement import Cluster

ROUNDING = 1e-9
"""relative, in float64: outputs, gradients and norms before the weights have changed"""
AFTER_ADAM = 1e-6
"""relative, in float64: everything, after up to six steps of Adam, which divides by the size of even tiny gradients"""

WORLDS = {
    "2 ranks": (Cluster(num_nodes=1, ranks_per_node=2), 2),
    "2 nodes of 1": (Cluster(num_nodes=2, ranks_per_node=1), 2),
    "4 ranks": (Cluster(num_nodes=1, ranks_per_node=4), 4),
    "2 nodes of 2": (Cluster(num_nodes=2, ranks_per_node=2), 4),
    "2 groups of 2": (Cluster(num_nodes=1, ranks_per_node=2), 4),
    "2 nodes of 4": (Cluster(num_nodes=2, ranks_per_node=4), 8),
    "2 groups of 2 nodes of 2": (Cluster(num_nodes=2, ranks_per_node=2), 8),
    "one process": (Cluster(num_nodes=1, ranks_per_node=1), 1),
}
SEEDS = {"2 nodes of 4": [102], "2 groups of 2 nodes of 2": [100]}
"""eight processes on two cores are slow: one case each, of our planner and of random plans with standing copies"""
QUICK = ("one process", "2 nodes of 1", "2 nodes of 2", "2 groups of 2 nodes of 2")
"""kinds of clusters that between them have everything the others have"""


def seen(results, name):
    return sum(case.seen.get(name, 0) for case in results[0])


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[] if world in QUICK else [pytest.mark.slow]) for world in WORLDS]
)
def test_equals_the_reference(world):
    cluster, processes = WORLDS[world]
    seeds = SEEDS.get(world, range(100, 104 if processes < 4 else 103))
    results = run_ranks(processes, train_cases, list(seeds), cluster)
    for rank, cases in enumerate(results):
        for seed, case in zip(seeds, cases, strict=True):
            assert case.first < ROUNDING, f"rank {rank}, seed {seed}: {case}"
            assert case.worst() < AFTER_ADAM, f"rank {rank}, seed {seed}: {case}"
    if processes > 1:
        assert seen(results, "flash") + seen(results, "standing") > 0
        assert seen(results, "moves") > 0


@pytest.mark.parametrize("world", ["2 nodes of 2", pytest.param("2 groups of 2", marks=pytest.mark.slow)])
def test_tokens_without_routing_are_routed_live(world):
    cluster, processes = WORLDS[world]
    results = run_ranks(processes, train_cases, list(range(200, 204)), cluster, 0.2)
    assert max(case.first for cases in results for case in cases) < ROUNDING
    assert max(case.worst() for cases in results for case in cases) < AFTER_ADAM
    assert seen(results, "live") > 0
    assert seen(results, "tolerant") > 0


@pytest.mark.parametrize(
    "sabotage", ["drop gradients of copies", pytest.param("swap two experts", marks=pytest.mark.slow)]
)
def test_the_comparison_notices(sabotage):
    cluster, processes = WORLDS["2 nodes of 2"]
    results = run_ranks(processes, train_cases, [100, 101, 102], cluster, 0.0, sabotage)
    assert max(case.worst() for cases in results for case in cases) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_many_more(world):
    cluster, processes = WORLDS[world]
    for first in range(1000, 1080, 20):
        unrecorded = 0.1 * (first % 40 == 0)
        seeds = list(range(first, first + 20))
        results = run_ranks(processes, train_cases, seeds, cluster, unrecorded, timeout_s=900)
        assert max(case.first for cases in results for case in cases) < ROUNDING
        assert max(case.worst() for cases in results for case in cases) < AFTER_ADAM
