"""What moves beside a layer: quotas are as level as a linear program makes them, and idle copies are given up."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.plan.planner import StepProblem
from equilibra.plan.relevel import THIRDS, base_rows, relevel, thirds
from equilibra.plan.step import Equilibra
from references.nodes import lowest_level

UPDATE, TILE = Stage.UPDATE, 32
FREE = dict.fromkeys(Stage, 0.0)
PRICED = replace(
    Rates.free(), hold_us={**FREE, UPDATE: 30.0}, serve_us={**FREE, UPDATE: 5.0},
    move_beside_us={**FREE, UPDATE: 12.0}, add_beside_us={**FREE, UPDATE: 20.0},
)  # fmt: skip
BLIND = replace(PRICED, move_beside_us=FREE, add_beside_us=FREE)


def problem(seed, rates, *, nodes=1):
    """Skewed experts on 8 ranks, 3 micro-batches of 2 layers."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(16, 0.8), size=(3, 2))[..., None] * rng.dirichlet(np.full(8, 5.0), size=(3, 2, 1))
    tokens = np.array([rng.multinomial(16_000, part.ravel()).reshape(16, 8) for part in weights.reshape(6, 16, 8)])
    load = StepLoad(tokens_MLER=tokens.reshape(3, 2, 16, 8).astype(np.int32))
    cluster = Cluster(num_nodes=nodes, ranks_per_node=8 // nodes)
    return StepProblem(cluster=cluster, given_load=load, rates=rates, spare_slots=2, standing_slots=2)


def planned(seed, rates, **shape):
    step = problem(seed, rates, **shape)
    plan = Equilibra(reorder=False).plan(step)  # nodes are levelled by standing copies then
    plan.check(step.load, spare_slots=2, standing_slots=2)
    return step, plan


def levelled(seed, rates=PRICED, **shape):
    """A plan that does not know what moves, and its update with quotas that do."""
    step, plan = planned(seed, replace(rates, move_beside_us=FREE, add_beside_us=FREE), **shape)
    part = plan.stages[UPDATE]
    return step, plan, part, relevel(part, step.load, plan.placement, plan.standing, rates, UPDATE)


def costs(step, plan, part, rates=PRICED):
    """[L * M, R] rows, and what copies cost besides."""
    rows_LMR = replace(plan, stages=dict.fromkeys(Stage, part)).rank_load(step.load, UPDATE)
    return rows_LMR.reshape(-1, 8) + base_rows(part, step.load, plan.standing, rates, UPDATE)


def copies_of(plan, part, p):
    layer, m = divmod(p, 3)
    flash = range(part.first_of_problem[p], part.first_of_problem[p + 1])
    stands = [c for c in np.flatnonzero(plan.standing.layer == layer) if part.standing_tokens_CMR[c, m].any()]
    return [(plan.standing.expert[c], plan.standing.rank[c]) for c in stands] + [
        (part.expert[f], part.rank[f]) for f in flash
    ]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_quotas_are_those_of_the_linear_program(seed, nodes):
    step, plan, part, found = levelled(seed, nodes=nodes)
    assert found.tokens_FR.any(axis=1).all()
    replace(plan, stages=dict.fromkeys(Stage, found)).check(step.load, spare_slots=2, standing_slots=2)
    base_PR, after, before = (
        base_rows(found, step.load, plan.standing, PRICED, UPDATE), costs(step, plan, found), costs(step, plan, part)
    )  # fmt: skip
    for p in range(6):
        layer, m = divmod(p, 3)
        amounts = np.concatenate([step.load.expert_load()[m, layer], base_PR[p]])
        homes = np.concatenate([plan.placement.home_of_expert[layer], np.arange(8)])
        best = lowest_level(amounts, homes, copies_of(plan, found, p), 8)
        assert best - 1 <= after[p].max() <= best * 1.002 + 2
        assert after[p].max() <= before[p].max()
    assert (plan.standing.num_copies > 0) == (nodes > 1)


def test_a_plan_that_does_not_know_is_worse():
    gaps = [
        costs(*levelled(seed)[:3]).max(axis=1).sum() / costs(*_with(levelled(seed))).max(axis=1).sum()
        for seed in range(6)
    ]
    assert np.mean(gaps) > 1.005


def _with(found):
    step, plan, _, part = found
    return step, plan, part


def test_the_planner_levels_by_itself():
    step, plan = planned(1, PRICED)
    assert np.array_equal(plan.stages[UPDATE].tokens_FR, levelled(1)[3].tokens_FR)
    assert not np.array_equal(plan.stages[UPDATE].tokens_FR, planned(1, BLIND)[1].stages[UPDATE].tokens_FR)
    assert step.load.tokens_MLER.sum() == plan.rank_load(step.load, UPDATE).sum()


@pytest.mark.parametrize("seed", range(4))
def test_fuller_tiles_make_no_rank_slower_than_the_slowest(seed):
    step, plan, _, level = levelled(seed)
    tiled = replace(PRICED, tile_rows=TILE)
    part = planned(seed, BLIND)[1].stages[UPDATE]
    full = relevel(part, step.load, plan.placement, plan.standing, tiled, UPDATE)
    replace(plan, stages=dict.fromkeys(Stage, full)).check(step.load, spare_slots=2)
    slow, fast = (_in_thirds(step, plan, one).max(axis=1) for one in (level, full))
    assert (fast <= slow).all()
    assert fast.sum() < slow.sum()


def _in_thirds(step, plan, part):
    """[L * M, R] what ranks take, last tiles counted whole; in thirds of rows."""
    cost_PR = 3 * base_rows(part, step.load, plan.standing, PRICED, UPDATE)
    for p in range(6):
        layer, m = divmod(p, 3)
        left = step.load.expert_load()[m, layer].astype(np.int64)
        for f in range(part.first_of_problem[p], part.first_of_problem[p + 1]):
            served = int(part.tokens_FR[f].sum())
            left[part.expert[f]] -= served
            cost_PR[p, part.rank[f]] += thirds(served, TILE) - TILE
        np.add.at(cost_PR[p], plan.placement.home_of_expert[layer], 3 * left + 2 * (-left % TILE))
    return cost_PR


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("us", [100.0, 400.0, 1e300])
def test_copies_that_levelling_leaves_without_tokens_are_given_up(us, nodes):
    dear = replace(PRICED, move_beside_us={**FREE, UPDATE: us})
    step, plan, part, found = levelled(3, dear, nodes=nodes)
    replace(plan, stages=dict.fromkeys(Stage, found)).check(step.load, spare_slots=2, standing_slots=2)
    assert found.num_copies < part.num_copies
    assert found.tokens_FR.any(axis=1).all()
    assert set(_places(found)) < set(_places(part))
    slow, fast = (costs(step, plan, one, dear).max(axis=1) for one in (part, found))
    assert (fast <= slow).all()
    assert fast.sum() < slow.sum()


def test_standing_copies_are_levelled_without_the_last_flash_copy():
    dear = replace(PRICED, hold_us={**FREE, UPDATE: 1e4})
    step, plan, part, _ = levelled(5, nodes=2)
    served, kept = part.tokens_FR.sum(axis=1), slice(20, 21)
    assert served[20] > 0
    problem = int(part.problem_of_copy()[20])
    one = replace(
        part, first_of_problem=(np.arange(7) > problem).astype(np.int64), expert=part.expert[kept],
        rank=part.rank[kept], origin=part.origin[kept], tokens_FR=part.tokens_FR[kept],
    )  # fmt: skip
    found = relevel(one, step.load, plan.placement, plan.standing, dear, UPDATE)
    assert found.num_copies == 0
    base_PR = base_rows(found, step.load, plan.standing, dear, UPDATE)
    after = costs(step, plan, found, dear)
    for p in range(6):
        layer, m = divmod(p, 3)
        amounts = np.concatenate([step.load.expert_load()[m, layer], base_PR[p]])
        homes = np.concatenate([plan.placement.home_of_expert[layer], np.arange(8)])
        assert after[p].max() <= lowest_level(amounts, homes, copies_of(plan, found, p), 8) * 1.002 + 2


def _places(part):
    return zip(
        part.problem_of_copy().tolist(), part.expert.tolist(), part.rank.tolist(), part.origin.tolist(), strict=True
    )


def test_without_a_price_or_with_traffic_nothing_changes():
    step, plan, part, _ = levelled(0, nodes=2)
    assert relevel(part, step.load, plan.placement, plan.standing, BLIND, UPDATE) is part
    assert relevel(part, step.load, plan.placement, plan.standing, PRICED, Stage.LOGPROB) is part
    dear = replace(PRICED, cross_row_us=1.0)
    assert relevel(part, step.load, plan.placement, plan.standing, dear, UPDATE) is part


def test_neighbours_are_the_visits_before_and_after():
    step, plan, part, _ = levelled(2)
    only = replace(Rates.free(), move_beside_us={**FREE, UPDATE: 1.0})
    moved_PR = base_rows(part, step.load, plan.standing, only, UPDATE)
    held = [np.bincount(part.rank[part.problem_of_copy() == p], minlength=8) for p in range(6)]
    visits = [layer * 3 + m for m in range(3) for layer in range(2)]
    for at, p in enumerate(visits):
        assert np.array_equal(moved_PR[p], 2 * held[visits[(at + 1) % 6]] + held[visits[at - 1]])


@pytest.mark.parametrize("rows", [0, 2**31 + 1, 1.5, "128"])
def test_tiles_have_whole_rows(rows):
    with pytest.raises(InputError, match="tile_rows must be a whole number"):
        replace(PRICED, tile_rows=rows)


def test_prices_beyond_all_rows_are_cut_and_logprob_has_no_gradients():
    step, plan, part, _ = levelled(2)
    absurd = replace(PRICED, hold_us={**FREE, UPDATE: 1e300})
    assert base_rows(part, step.load, plan.standing, absurd, UPDATE).max() == 2**31
    same = dict.fromkeys(Stage, 1.0)
    moves = replace(Rates.free(), move_beside_us=same, add_beside_us=same)
    forward = base_rows(part, step.load, plan.standing, moves, Stage.LOGPROB)
    assert forward.sum() == part.num_copies
    assert base_rows(part, step.load, plan.standing, moves, UPDATE).sum() == 4 * part.num_copies


@pytest.mark.parametrize("seed", range(4))
def test_no_other_rows_of_one_copy_bring_down_the_slower_of_its_two_ranks(seed):
    step, plan, _, _ = levelled(seed)
    tiled = replace(PRICED, tile_rows=TILE)
    part = relevel(
        planned(seed, BLIND)[1].stages[UPDATE], step.load, plan.placement, plan.standing, tiled, UPDATE
    )  # fmt: skip
    cost_PR, slower = _in_thirds(step, plan, part), []
    for p in range(6):
        layer, m = divmod(p, 3)
        home, left = plan.placement.home_of_expert[layer], step.load.expert_load()[m, layer].astype(np.int64)
        copies = range(part.first_of_problem[p], part.first_of_problem[p + 1])
        for f in copies:
            left[part.expert[f]] -= part.tokens_FR[f].sum()
        for f in copies:
            here, e, r = int(part.tokens_FR[f].sum()), part.expert[f], part.rank[f]
            both = here + left[e]
            new = np.arange(1, both + 1)
            at_copy = cost_PR[p, r] - thirds(here, TILE) + thirds(new, TILE)
            at_home = cost_PR[p, home[e]] - thirds(left[e], TILE) + thirds(both - new, TILE)
            now = max(cost_PR[p, r], cost_PR[p, home[e]])
            slower.append(now - np.maximum(at_copy, at_home).min())
    assert len(slower) > 20
    assert max(slower) <= 2 * THIRDS, "to two rows"
