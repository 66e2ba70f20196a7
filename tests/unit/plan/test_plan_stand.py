"""Standing copies against linear and mixed-integer programs."""

import numpy as np
import pytest

from equilibra.plan.level import level_nodes
from equilibra.plan.stand import choose_standing_copies
from references.nodes import best_standing_copies, lowest_level


def level(amount, home_node, copies, num_nodes):
    """Node loads and shares of level_nodes."""
    x = np.bincount(home_node, weights=amount, minlength=num_nodes).astype(np.int64)
    share = np.zeros(len(copies) + 1, np.int64)
    expert, node = np.array([*copies, (0, 0)]).T.astype(np.int64).copy()
    level_nodes(x, share, amount, expert, node, home_node, len(copies))
    return x, share[:-1]


def random_copies(rng, num_experts, home_node, num_nodes):
    wanted = int(rng.integers(1, 3 * num_nodes))
    drawn = zip(rng.integers(0, num_experts, wanted), rng.integers(0, num_nodes, wanted), strict=True)
    return sorted({(int(e), int(n)) for e, n in drawn if home_node[e] != n})


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("tokens", [40, 3_000, 1_000_000])
def test_levels_are_those_of_a_linear_program(num_nodes, tokens):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        num_experts = num_nodes * int(rng.integers(2, 6))
        home_node = np.repeat(np.arange(num_nodes), num_experts // num_nodes)
        weights = rng.dirichlet(np.full(num_experts, 10 ** rng.uniform(-1, 0.7)))
        amount = rng.multinomial(tokens * num_nodes, weights).astype(np.int64)
        copies = random_copies(rng, num_experts, home_node, num_nodes)
        if not copies:
            continue
        x, share = level(amount, home_node, copies, num_nodes)
        assert x.sum() == amount.sum()
        assert share.min() >= 0
        expected = np.bincount(home_node, weights=amount, minlength=num_nodes)
        for (expert, node), tokens_there in zip(copies, share, strict=True):
            expected[home_node[expert]] -= tokens_there
            expected[node] += tokens_there
        assert x.tolist() == expected.tolist(), "node loads are those of the shares"
        best = lowest_level(amount, home_node, copies, num_nodes)
        assert x.max() >= best - 1e-6 * max(best, 1)
        # whole tokens: two nodes joined by a copy may differ by one, so a chain of nodes by their number
        assert x.max() <= best * (1 + 1e-3) + num_nodes


@pytest.mark.parametrize("num_nodes", [3, 4, 6, 8])
def test_a_chain_of_nodes_is_levelled_through(num_nodes):
    """Node n can only give to node n + 1: the slowest way for levels to spread."""
    home_node = np.arange(num_nodes)
    amount = np.full(num_nodes, 100, np.int64)
    amount[0] += 100_000
    amount[1:-1] += 100_000
    copies = [(n, n + 1) for n in range(num_nodes - 1)]
    x, _ = level(amount, home_node, copies, num_nodes)
    best = lowest_level(amount, home_node, copies, num_nodes)
    assert x.max() <= best * 1.001 + num_nodes


def choose(load_EM, home_node, num_nodes, slots, price, good_enough=0):
    expert, node = np.zeros((2, num_nodes * slots + 1), np.int64)
    n, cost = choose_standing_copies(load_EM, home_node, num_nodes, slots, price, good_enough, 1, expert, node)
    return list(zip(expert[:n].tolist(), node[:n].tolist(), strict=True)), int(cost)


def instance(seed):
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(2, 4))
    num_experts = num_nodes * int(rng.integers(2, 4))
    home_node = np.repeat(np.arange(num_nodes), num_experts // num_nodes)
    popularity = rng.dirichlet(np.full(num_experts, 10 ** rng.uniform(-0.5, 0.7))) * 50 + 0.01
    load = np.stack(
        [rng.multinomial(2000 * num_nodes, rng.dirichlet(popularity)) for _ in range(rng.integers(1, 4))], 1
    )
    return load.astype(np.int64), home_node, num_nodes, int(rng.integers(1, 3)), int(rng.choice([0, 5, 50, 200]))


def none_cost(load_EM, home_node, num_nodes):
    per_node = [np.bincount(home_node, weights=load, minlength=num_nodes).max() for load in load_EM.T]
    return int(sum(per_node))


def test_copies_are_close_to_those_of_a_mixed_integer_program():
    over = []
    for seed in range(40):
        load, home_node, num_nodes, slots, price = instance(seed)
        copies, cost = choose(load, home_node, num_nodes, slots, price)
        total = cost + price * len(copies)
        best = best_standing_copies(load, home_node, num_nodes, slots, price)
        assert total >= best - 1e-3
        over.append(total / best - 1)
    assert np.mean(over) <= 0.005, np.round(over, 4)
    assert max(over) <= 0.10, np.round(over, 4)


def test_copies_keep_their_promises():
    for seed in range(300):
        load, home_node, num_nodes, slots, price = instance(seed)
        copies, cost = choose(load, home_node, num_nodes, slots, price)
        assert copies == sorted(set(copies))
        assert all(home_node[e] != n for e, n in copies)
        assert max([0, *np.bincount([n for _, n in copies] or [0]) - (not copies)]) <= slots
        levels = [level(load[:, m], home_node, copies, num_nodes)[0].max() for m in range(load.shape[1])]
        assert cost == sum(levels), "the cost reported is that of the copies"
        assert cost + price * len(copies) <= none_cost(load, home_node, num_nodes), "worse than no copies at all"
        for k in range(len(copies)):
            fewer = copies[:k] + copies[k + 1 :]
            if fewer:
                without = sum(level(load[:, m], home_node, fewer, num_nodes)[0].max() for m in range(load.shape[1]))
            else:
                without = none_cost(load, home_node, num_nodes)
            assert without - cost >= max(price, 1), f"seed {seed}: copy {copies[k]} gains {without - cost}"


@pytest.mark.parametrize("price", [0, 10, 16, 20, 24, 40])
def test_two_copies_that_only_help_together_are_paid_together(price):
    """Nodes of 100, 100 and 0: no copy alone lowers the highest, two do, by 25 to 33, and must pay for both."""
    load = np.array([50, 50, 50, 50, 0, 0], np.int64)[:, None]
    copies, cost = choose(load, np.array([0, 0, 1, 1, 2, 2]), 3, 1, price)
    assert cost + price * len(copies) <= 100
    assert (len(copies) > 0) == (price <= 10)


def test_no_copy_is_made_where_nothing_is_skewed():
    load = np.full((8, 3), 100, np.int64)
    assert choose(load, np.repeat(np.arange(4), 2), 4, 2, 0) == ([], 600)


def test_zero_loads_need_no_copies():
    assert choose(np.zeros((8, 3), np.int64), np.repeat(np.arange(4), 2), 4, 2, 0) == ([], 0)
