"""Random plans executed on whole numbers: no pair lost or doubled. `benchmarks.million_plans` does a million."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import PlanError
from equilibra.core.plan import Stage
from references.executed import (
    ROUTINGS,
    LostPairError,
    Routed,
    Tally,
    check_slots,
    execute,
    planned,
    random_step,
    run_step,
    tables_of,
)


def test_thousands_of_random_plans_lose_and_double_nothing():
    tally = Tally()
    steps = [run_step(np.random.default_rng(seed), tally) for seed in range(10**6, 10**6 + 40)]
    assert tally.visits > 2000
    assert min(tally.copies, tally.standing, tally.moves) > 0
    assert {step.routing for step in steps} == set(ROUTINGS)
    assert len({step.cluster for step in steps}) > 10


@pytest.mark.slow
def test_many_random_plans_lose_and_double_nothing():
    tally = Tally()
    for seed in range(2 * 10**6, 2 * 10**6 + 400):
        run_step(np.random.default_rng(seed), tally)
    assert tally.visits > 20_000


@pytest.fixture(scope="module")
def case():
    """A visit with a flash copy that serves several sources."""
    for seed in range(100):
        step = random_step(np.random.default_rng(seed))
        if step.planner != "equilibra" or step.cluster.num_ranks < 2:
            continue
        plan = planned(step)
        for m in range(plan.num_micro_batches):
            routed = tables_of(step, plan, Stage.UPDATE, 0, m)
            if (routed.visit.flash_tokens_FR > 0).sum() > 2 and step.experts[m][0].size > 4:
                return step, plan, m, routed
    raise AssertionError("no plan has a copy")


def values(ids):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 2**64, len(of_rank), np.uint64) for of_rank in ids]


def test_the_checker_passes_the_plan_that_its_controls_break(case):
    step, _, m, routed = case
    assert execute(step.experts[m], routed, values(step.experts[m])) == sum(ids.size for ids in step.experts[m])


@pytest.mark.parametrize("change", [1, -1])
def test_a_token_that_only_one_side_gives_to_a_copy_is_found(case, change):
    step, _, m, routed = case
    tokens = routed.visit.flash_tokens_FR.copy()
    copy, source = np.argwhere(tokens > 0)[0]
    tokens[copy, source] += change
    told = replace(routed.visit, flash_tokens_FR=tokens)
    received = [
        told.receive_table(rank, told.counts(step.problem.load, rank)) for rank in range(step.cluster.num_ranks)
    ]
    with pytest.raises(LostPairError):
        execute(
            step.experts[m],
            Routed(visit=routed.visit, sent=routed.sent, received=received),
            values(step.experts[m]),
        )


@pytest.mark.parametrize("what", ["doubled", "swapped", "other token", "other expert"])
def test_one_wrong_row_is_found(case, what):
    step, _, m, routed = case
    table, visit = routed.sent[0], routed.visit
    row, token = table.row_of_pair.copy(), table.token_of_row.copy()
    if what == "doubled":
        row.flat[1] = row.flat[0]
    elif what == "swapped":
        row.flat[0], row.flat[-1] = row.flat[-1], row.flat[0]
    elif what == "other token":
        token[0] = (token[0] + 1) % len(step.experts[m][0])
    else:
        flash = visit.flash_expert.copy()
        flash[visit.flash_tokens_FR.sum(axis=1).argmax()] += 1
        visit = replace(visit, flash_expert=flash % visit.home_of_expert.size)
    sent = [table._replace(row_of_pair=row, token_of_row=token), *routed.sent[1:]]
    with pytest.raises(LostPairError):
        execute(step.experts[m], Routed(visit=visit, sent=sent, received=routed.received), values(step.experts[m]))


def test_a_plan_that_gives_a_copy_more_than_there_is_is_refused(case):
    step, plan, *_ = case
    part = plan.stages[Stage.UPDATE]
    tokens = part.tokens_FR.copy()
    tokens[0] += 10**6
    wrong = replace(plan, stages=dict.fromkeys(Stage, replace(part, tokens_FR=tokens)))
    with pytest.raises(PlanError):
        wrong.check(step.problem.load)


def test_slots_that_leave_a_pair_out_are_found(case):
    step, plan, m, _ = case
    if plan.standing.num_copies == 0:
        check_slots(step, plan, 0, m)
    missing = replace(step, experts=[[ids + plan.placement.num_experts for ids in of] for of in step.experts])
    with pytest.raises(LostPairError):
        check_slots(missing, plan, 0, m)
