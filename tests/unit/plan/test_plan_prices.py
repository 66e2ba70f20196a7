"""Copies that cost something: what is levelled is rows and prices together."""

import numpy as np
import pytest

from benchmarks.exact import exact_makespan
from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.plan.one_layer import balance
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from references.effective import effective_load, effective_rows

ROWS = 4096


def small(seed):
    """At most 4 ranks and 12 experts, and prices up to 5 and 3 % of a rank's rows."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 5))
    num_experts = num_ranks * int(rng.integers(1, 12 // num_ranks + 1))
    weights = np.exp(rng.normal(0, rng.uniform(0.3, 1.5), num_experts))
    load = rng.multinomial(int(rng.integers(300, 3000)), weights / weights.sum())
    mean = load.sum() / num_ranks
    return load, num_ranks, int(rng.integers(1, 3)), int(mean * rng.uniform(0, 0.05)), int(mean * rng.uniform(0, 0.03))


def on_first_source(load, num_ranks):
    tokens = np.zeros((load.size, num_ranks), np.int32)
    tokens[:, 0] = load
    return tokens


def large(seed, num_ranks, num_experts):
    """Tokens of one node with skewed experts."""
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(0, rng.uniform(0.3, 1.5), num_experts))
    return on_first_source(rng.multinomial(num_ranks * ROWS, weights / weights.sum()), num_ranks)


def test_effective_loads_are_close_to_those_of_the_exact_program():
    over, blind_over = [], []
    for seed in range(80):
        load, num_ranks, slots, hold, serve = small(seed)
        tokens, cluster = on_first_source(load, num_ranks), Cluster(ranks_per_node=num_ranks)
        home = contiguous(cluster, num_layers=1, num_experts=load.size).home_of_expert[0]
        best = exact_makespan(load, home, cluster, slots=slots, hold_rows=hold, serve_rows=serve)
        assert best.proven
        prices = {"hold_rows": hold, "serve_rows": serve}
        aware = balance(tokens, cluster=cluster, spare_slots=slots, tolerance=0.0, **prices)
        blind = balance(tokens, cluster=cluster, spare_slots=slots, tolerance=0.0)
        found = effective_load(aware, home, hold=hold, serve=serve).max()
        assert found >= best.makespan, "the exact solver was beaten: it is wrong"
        assert np.bincount(aware.rank_of_copy, minlength=1).max() <= slots
        over.append(found / best.makespan - 1)
        blind_over.append(effective_load(blind, home, hold=hold, serve=serve).max() / best.makespan - 1)
    assert np.mean(over) <= 0.004
    assert np.max(over) <= 0.03
    assert np.mean(blind_over) >= 3 * np.mean(over), "planning without prices must be seen to cost something here"


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(8, 32), (8, 128), (16, 128), (64, 256)])
def test_receivers_are_not_the_slowest_ranks_any_more(num_ranks, num_experts):
    hold, serve = 40, 26
    cluster = Cluster(ranks_per_node=num_ranks)
    home = contiguous(cluster, num_layers=1, num_experts=num_experts).home_of_expert[0]
    aware_over, blind_over = [], []
    for seed in range(12):
        tokens = large(seed, num_ranks, num_experts)
        aware = balance(tokens, cluster=cluster, hold_rows=hold, serve_rows=serve)
        blind = balance(tokens, cluster=cluster)
        floor = ROWS + aware.expert_of_copy.size * (hold + serve) / num_ranks
        aware_over.append(effective_load(aware, home, hold=hold, serve=serve).max() / floor - 1)
        blind_over.append(effective_load(blind, home, hold=hold, serve=serve).max() / floor - 1)
    assert np.mean(aware_over) <= 0.006, "no plan with as many copies is below the floor"
    assert np.mean(blind_over) >= np.mean(aware_over) + 0.004


def test_no_price_changes_nothing():
    for seed in range(30):
        tokens = large(seed, 8, 64)
        cluster = Cluster(ranks_per_node=8)
        plain, free = balance(tokens, cluster=cluster), balance(tokens, cluster=cluster, hold_rows=0, serve_rows=0)
        np.testing.assert_array_equal(plain.tokens_FR, free.tokens_FR)
        np.testing.assert_array_equal(plain.rank_of_copy, free.rank_of_copy)


def test_a_copy_that_costs_more_than_it_saves_is_not_made():
    tokens = on_first_source(np.array([110, 90]), 2)
    cluster = Cluster(ranks_per_node=2)
    assert balance(tokens, cluster=cluster, tolerance=0.0).rank_load.max() == 100
    for prices in ({"hold_rows": 21}, {"serve_rows": 21}, {"hold_rows": 11, "serve_rows": 10}):
        assert balance(tokens, cluster=cluster, tolerance=0.0, **prices).expert_of_copy.size == 0
    cheap = balance(tokens, cluster=cluster, tolerance=0.0, hold_rows=4, serve_rows=2)
    assert cheap.rank_load.tolist() == [101, 99], "103 each: 101 rows and serving, 99 rows and holding"


@pytest.mark.parametrize("wrong", [-1, 2**31 + 1, 1.5, None])
@pytest.mark.parametrize("name", ["hold_rows", "serve_rows"])
def test_prices_are_whole_and_not_negative(name, wrong):
    with pytest.raises(InputError, match=name):
        balance(large(0, 4, 8), cluster=Cluster(ranks_per_node=4), **{name: wrong})


@pytest.mark.parametrize("hold", [2**31, 10**6])
def test_a_price_beyond_all_rows_means_no_copies(hold):
    assert balance(large(3, 8, 32), cluster=Cluster(ranks_per_node=8), hold_rows=hold).expert_of_copy.size == 0


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_whole_step_levels_time_stage_by_stage(num_nodes):
    rng = np.random.default_rng(5)
    cluster = Cluster(num_nodes=num_nodes, ranks_per_node=8)
    weights = np.exp(rng.normal(0, 1.0, (2, 64, 1)))
    tokens = rng.poisson(ROWS / 64 * weights / weights.mean(axis=1, keepdims=True) * np.ones((3, 2, 64, 8 * num_nodes)))
    load = StepLoad(tokens_MLER=tokens.astype(np.int32))
    blind = Rates.free()
    aware = Rates(
        row_us=blind.row_us, cross_row_us=0.0, flash_copy_us=blind.flash_copy_us, standing_copy_us=0.0, move_us=0.0,
        move_inside_us=0.0, hold_us={Stage.LOGPROB: 0.0, Stage.UPDATE: 60.0},
        serve_us={Stage.LOGPROB: 0.0, Stage.UPDATE: 40.0},
    )  # fmt: skip
    plans = [
        Equilibra(threads=1).plan(StepProblem(cluster=cluster, given_load=load, rates=rates))
        for rates in (blind, aware)
    ]
    for plan in plans:
        plan.check(load)
    of_update = [effective_rows(plan, load, Stage.UPDATE, hold=60, serve=40).max(axis=2).sum() for plan in plans]
    assert of_update[1] < 0.995 * of_update[0]
    of_logprob = [effective_rows(plan, load, Stage.LOGPROB, hold=0, serve=0).max(axis=2).sum() for plan in plans]
    assert of_logprob[1] <= 1.001 * of_logprob[0], "log-prob has no gradients: its copies cost nothing here"


def test_prices_in_rows_follow_from_microseconds():
    rates = Rates.free()
    assert [rates.hold_rows(stage) for stage in Stage] == [rates.serve_rows(stage) for stage in Stage] == [0, 0]
    priced = Rates(
        row_us={Stage.LOGPROB: 0.1, Stage.UPDATE: 0.3}, cross_row_us=0.0, flash_copy_us=rates.flash_copy_us,
        standing_copy_us=0.0, move_us=0.0, move_inside_us=0.0, hold_us=dict.fromkeys(Stage, 30.0),
        serve_us={Stage.LOGPROB: 0.0, Stage.UPDATE: 1e300},
    )  # fmt: skip
    assert [priced.hold_rows(stage) for stage in Stage] == [300, 100]
    assert [priced.serve_rows(stage) for stage in Stage] == [0, 2**31]
    with pytest.raises(InputError, match="hold_us"):
        Rates(
            row_us=rates.row_us, cross_row_us=0.0, flash_copy_us=rates.flash_copy_us, standing_copy_us=0.0,
            move_us=0.0, move_inside_us=0.0, hold_us={Stage.UPDATE: 1.0},
        )  # fmt: skip
