"""Several optimizer steps under one plan equal the same steps in one process, however copies travel."""

from itertools import pairwise

import pytest
from tests.distributed.mini_batches import mini_batch_cases, mini_batch_errors
from tests.distributed.ranks import run_ranks
from tests.protocol.recorded import ASKED

from equilibra.core.placement import Cluster
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


def difference(asked, wanted):
    """Where the executor leaves the model."""
    at = next((i for i, pair in enumerate(zip(asked, wanted, strict=False)) if pair[0] != pair[1]), -1)
    return f"call {at} of {len(asked)} and {len(wanted)}: {asked[at : at + 3]}, the model: {wanted[at : at + 3]}"


@pytest.mark.parametrize("world", WORLDS)
def test_mini_batches_equal_the_reference(world):
    cluster, processes = WORLDS[world]
    results = run_ranks(processes, mini_batch_cases, CASES[world], cluster)
    for rank, cases in enumerate(results):
        for (planner, *_), case in zip(CASES[world], cases, strict=True):
            assert case.worst() < ROUNDING, f"rank {rank}, {planner}: {case}"
            assert case.asked == case.wanted, f"rank {rank}, {planner}: {difference(case.asked, case.wanted)}"
            assert case.seen["stale"] == 0
            at = next(i for i, (one, two) in enumerate(pairwise(case.asked)) if one != two)
            swapped = [*case.asked[:at], case.asked[at + 1], case.asked[at], *case.asked[at + 2 :]]
            assert swapped != case.wanted, "the control: another order is another run"
    for first in range(0, processes, cluster.ranks_per_node):  # ranks of a node make the same calls
        for other in results[first : first + cluster.ranks_per_node]:
            assert [case.asked for case in other] == [case.asked for case in results[first]]
    assert {call.what for cases in results for case in cases for call in case.asked} == ASKED
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
        assert errors[-1] == "" or "cannot send 0 tensors for the" in errors[-1]


def test_the_comparison_notices_stale_copies():
    cluster, processes = WORLDS["2 ranks"]
    results = run_ranks(processes, stale_cases, cluster)
    assert max(case.worst() for cases in results for case in cases) > 1e-4
    assert any(case.asked != case.wanted for cases in results for case in cases), "the model allows stale copies"


def stale_cases(cluster):
    return mini_batch_cases([("random", Path.COLLECTIVE, 2), ("random", Path.COLLECTIVE, 3)], cluster, 3, stale=True)
