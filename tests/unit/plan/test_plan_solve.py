"""Problems solved one by one: their imbalance before and after, and the bound, as plain loops have them."""

import numpy as np
import pytest

from equilibra.core.placement import Cluster
from equilibra.plan.entry import over_sources, solve_problems


def test_tokens_are_spread_evenly_over_sources():
    spread = over_sources(np.array([[7, 0, 12, 5], [1, 1, 1, 1]]), 4)
    assert spread.sum(axis=2).tolist() == [[7, 0, 12, 5], [1, 1, 1, 1]]
    assert (spread.max(axis=2) - spread.min(axis=2)).max() <= 1
    assert spread[1].sum(axis=0).tolist() == [1, 1, 1, 1], "odd tokens go to different ranks"


@pytest.mark.parametrize(("shape", "slots"), [((1, 4), 2), ((2, 2), 2), ((2, 4), 1), ((1, 4), 0)])
def test_the_figures_are_those_of_the_loads(shape, slots):
    cluster = Cluster(num_nodes=shape[0], ranks_per_node=shape[1])
    num_ranks, rng = cluster.num_ranks, np.random.default_rng(3)
    load_PE = (rng.integers(0, 300, (5, 16)) // rng.integers(1, 9, (5, 16))).astype(np.int64)
    load_PE[4] = 0
    solved = solve_problems(
        over_sources(load_PE, num_ranks), cluster=cluster, spare_slots=slots, tolerance=0.0, passes=2
    )
    for p, load in enumerate(load_PE.tolist()):
        per_rank = [sum(load[16 // num_ranks * r : 16 // num_ranks * (r + 1)]) for r in range(num_ranks)]
        mean = sum(per_rank) / num_ranks
        per_node = [sum(per_rank[n * shape[1] : (n + 1) * shape[1]]) for n in range(shape[0])]
        bound = -(-max(per_node) // shape[1]) if slots else max(per_rank)
        assert solved.imbalance_before[p] == pytest.approx(max(per_rank) / mean if mean else 1.0)
        assert solved.lower_bound[p] == pytest.approx(bound / mean if mean else 1.0)
        assert solved.lower_bound[p] <= solved.imbalance_after[p] <= solved.imbalance_before[p]
        assert (solved.copies[p] > 0) == (solved.imbalance_after[p] < solved.imbalance_before[p])
        assert solved.largest_fan_out[p] <= solved.copies[p] <= slots * num_ranks
    assert solved.copies.max() > 0 or slots == 0
    assert solved.solve_us.shape == (2, 5)
    assert solved.solve_us.min() > 0
