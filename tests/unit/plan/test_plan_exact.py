"""The exact solver against trying everything, and the bounds against the exact solver."""

import sys
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.exact import exact_fewest_copies, exact_makespan
from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, Placement


def lowest_with(load, home, num_ranks, copies):
    """Smallest slowest rank with these copies: by the cut condition of the transport problem, in whole tokens.

    For every set of ranks, the experts that have no instance outside it must fit on it.
    """
    lowest = 0
    ranks_of = [{int(home[e])} | {r for f, r in copies if f == e} for e in range(len(load))]
    for size in range(1, num_ranks + 1):
        for ranks in combinations(range(num_ranks), size):
            inside = sum(int(load[e]) for e in range(len(load)) if ranks_of[e] <= set(ranks))
            lowest = max(lowest, -(-inside // size))
    return lowest


def brute_force(load, home, num_ranks, slots):
    """{number of copies: smallest slowest rank}, by trying all sets of copies."""
    options = []
    for r in range(num_ranks):
        others = [e for e in range(len(load)) if home[e] != r]
        sets = [c for k in range(min(slots, len(others)) + 1) for c in combinations(others, k)]
        options.append([[(e, r) for e in chosen] for chosen in sets])
    best = {}
    for chosen in product(*options):
        copies = [copy for some in chosen for copy in some]
        value = lowest_with(load, home, num_ranks, copies)
        best[len(copies)] = min(best.get(len(copies), value), value)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_exact_is_the_best_of_all_copies(seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = [(2, 4), (3, 3), (3, 6), (2, 6)][seed % 4]
    home = np.arange(num_experts) // (num_experts // num_ranks)
    load = rng.multinomial(200, rng.dirichlet(np.full(num_experts, 0.6)))
    slots = 1 + (seed % 8 >= 4 and num_ranks == 2)
    cluster = Cluster(ranks_per_node=num_ranks)
    best = brute_force(load, home, num_ranks, slots)
    found = exact_makespan(load, home, cluster, slots=slots)
    assert found.proven
    assert found.makespan == min(best.values())
    for cap in sorted({min(best.values()) - 1, *best.values()}):
        fewest = min((n for n, value in best.items() if value <= cap), default=None)
        assert exact_fewest_copies(load, home, cluster, slots=slots, cap=cap) == fewest


def test_copies_stay_in_their_node():
    home = np.arange(4)
    load = np.array([100, 0, 10, 30])
    assert exact_makespan(load, home, Cluster(num_nodes=2, ranks_per_node=2), slots=2).makespan == 50
    assert exact_makespan(load, home, Cluster(num_nodes=1, ranks_per_node=4), slots=2).makespan == 35
    assert exact_makespan(load, home, Cluster(num_nodes=4, ranks_per_node=1), slots=2).makespan == 100
    assert exact_fewest_copies(load, home, Cluster(num_nodes=2, ranks_per_node=2), slots=2, cap=50) == 1
    assert exact_fewest_copies(load, home, Cluster(num_nodes=2, ranks_per_node=2), slots=2, cap=49) is None


def test_nothing_to_do_is_exact_too():
    cluster = Cluster(ranks_per_node=2)
    assert exact_makespan(np.zeros(4, int), np.array([0, 0, 1, 1]), cluster, slots=1).makespan == 0
    assert exact_makespan(np.array([5, 9]), np.array([0, 1]), cluster, slots=0).makespan == 9
    assert exact_fewest_copies(np.array([5, 9]), np.array([0, 1]), cluster, slots=0, cap=9) == 0
    assert exact_fewest_copies(np.array([5, 9]), np.array([0, 1]), cluster, slots=0, cap=7) is None


@pytest.mark.parametrize(
    ("load", "home", "slots", "message"),
    [
        ([1, 2], [0], 1, r"\(2,\) and \(1,\)"),
        ([], [], 1, "at least one"),
        ([1.5, 2.0], [0, 1], 1, "float64"),
        ([1, -2], [0, 1], 1, "-2"),
        ([1, 2], [0, 2], 1, "0 to 2"),
        ([1, 2], [0, 1], -1, "-1"),
    ],
)
def test_wrong_values_are_named(load, home, slots, message):
    with pytest.raises(InputError, match=message):
        exact_makespan(np.array(load), np.array(home), Cluster(ranks_per_node=2), slots=slots)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InputError, match=r"equilibra\[bench\]"):
        exact_makespan(np.array([9, 0]), np.array([0, 1]), Cluster(ranks_per_node=2), slots=1)


def bound_of_flash_only(load, placement, *, spare_slots):
    """[L, M] fewest tokens of the slowest rank if homes stay and copies are made only inside a node.

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
    slowest = in_bin_LMB.max(axis=2)
    return -(-slowest // group) if spare_slots else slowest


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_bounds_are_never_above_the_exact_optimum_and_sometimes_reach_it(slots):
    reached = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cluster = Cluster(num_nodes=int(rng.integers(1, 3)), ranks_per_node=int(rng.integers(1, 4)))
        num_experts = cluster.num_ranks * int(rng.integers(1, 4))
        home = rng.permutation(np.repeat(np.arange(cluster.num_ranks), num_experts // cluster.num_ranks))
        tokens = rng.poisson(rng.gamma(0.7, 40, (2, 2, num_experts, 1)) * np.ones(cluster.num_ranks))
        load = StepLoad(tokens_MLER=np.ascontiguousarray(tokens, np.int32))
        placement = Placement(home_of_expert=np.stack([home, home]).astype(np.int32), cluster=cluster)
        any_plan = load.lower_bound()
        flash_only = bound_of_flash_only(load, placement, spare_slots=slots)
        assert any_plan.shape == flash_only.shape == (2, 2)
        assert (any_plan <= flash_only).all()
        for layer in range(2):
            for m in range(2):
                best = exact_makespan(tokens[m, layer].sum(axis=1), home, cluster, slots=slots).makespan
                assert flash_only[layer, m] <= best
                reached += flash_only[layer, m] == best
    assert reached >= 20


def test_any_plan_is_the_mean_rounded_up():
    tokens = np.zeros((1, 1, 2, 2), np.int32)
    tokens[0, 0, 0] = [3, 4]
    assert StepLoad(tokens_MLER=tokens).lower_bound().tolist() == [[4]]
