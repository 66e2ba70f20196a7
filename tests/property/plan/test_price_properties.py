"""Copies that cost something: knowing it never makes a plan worse, on one node or on several."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equilibra.core.placement import Cluster, contiguous
from equilibra.plan.micro_batch import NO_EXCHANGE
from equilibra.plan.one_layer import balance
from references.across import Case, split_of
from references.effective import effective_load

many = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tokens_and_prices(draw, cluster: Cluster) -> tuple[np.ndarray, int, int]:
    """Skewed loads, and prices from nothing to more than a rank's rows."""
    num_experts = cluster.num_ranks * draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.sampled_from([3, 50, 700, 20_000]))
    weights = np.exp(rng.normal(0, draw(st.floats(0, 2.5)), (num_experts, 1)))
    tokens = rng.poisson(rows / num_experts * weights / weights.mean() * np.ones((num_experts, cluster.num_ranks)))
    high = draw(st.sampled_from([0.02, 0.1, 1.5])) * rows
    return tokens.astype(np.int32), int(rng.uniform(0, high)), int(rng.uniform(0, high))


@many
@given(st.data())
def test_planning_with_prices_is_never_worse_than_without(data):
    cluster = Cluster(ranks_per_node=data.draw(st.integers(2, 24)))
    tokens, hold, serve = data.draw(tokens_and_prices(cluster))
    slots = data.draw(st.integers(1, 3))
    home = contiguous(cluster, num_layers=1, num_experts=len(tokens)).home_of_expert[0]
    aware = balance(tokens, cluster=cluster, spare_slots=slots, tolerance=0.0, hold_rows=hold, serve_rows=serve)
    blind = balance(tokens, cluster=cluster, spare_slots=slots, tolerance=0.0)
    assert np.bincount(aware.rank_of_copy, minlength=1).max() <= slots
    with_prices = int(effective_load(aware, home, hold=hold, serve=serve).max())
    without = int(effective_load(blind, home, hold=hold, serve=serve).max())
    static = int(np.bincount(home, weights=tokens.sum(axis=1), minlength=cluster.num_ranks).max())
    fine = max((hold + serve) // cluster.num_ranks + 1, with_prices // 500 + 1)
    assert with_prices <= without + fine
    assert with_prices <= static, "copies that cost more than they save are not made"
    floor = tokens.sum() + aware.expert_of_copy.size * (hold + serve)
    assert with_prices * cluster.num_ranks >= floor, "nobody gets below the level of what there is to do"


@many
@given(st.data())
def test_an_exchange_raises_time_by_no_more_than_a_price_where_traffic_is_cheap(data):
    cluster = Cluster(num_nodes=data.draw(st.integers(2, 3)), ranks_per_node=data.draw(st.integers(2, 6)))
    tokens, hold, serve = data.draw(tokens_and_prices(cluster))
    case = Case(tokens_ER=tokens, cluster=cluster, hold=hold, serve=serve, row_slack=NO_EXCHANGE)
    before, after = split_of(case), split_of(replace(case, row_slack=0.0))
    assert after.effective().max() <= before.effective().max() + hold + serve
