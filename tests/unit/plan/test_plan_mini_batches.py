"""Mini-batches: packing keeps to them, schedules know them, and what is wrong with them is said."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import BudgetError, InputError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad
from equilibra.core.placement import Cluster
from equilibra.cost.rates import Rates
from equilibra.plan.pack import in_order, joined, turn_in_mini_batch
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from equilibra.plan.store import load_plan, save_plan

CLUSTER = Cluster(num_nodes=1, ranks_per_node=2)
PLANNER = Equilibra(threads=1, work=50_000)


def problem(mini, *, least=1, budget=60, seed=0, **changes):
    rng, mini = np.random.default_rng(seed), np.asarray(mini)
    lengths = rng.integers(10, 40, mini.size)
    tokens = np.stack([rng.multinomial(2 * n, rng.dirichlet(np.full(8, 0.3)), size=2) for n in lengths])
    sequences = SequenceLoad(tokens_SLE=tokens.astype(np.int32), length_of_sequence=lengths.astype(np.int64))
    schedule = joined(sequences, mini, lambda some: in_order(some.length_of_sequence, CLUSTER, tokens_per_rank=budget))
    fields = {
        "cluster": CLUSTER, "sequences": sequences, "schedule": schedule, "mini_batch_of_sequence": mini,
        "tokens_per_rank": budget, "least_micro_batches": least, "rates": Rates.free(),
    }  # fmt: skip
    return StepProblem(**{**fields, **changes})


@pytest.mark.parametrize("seed", range(5))
def test_every_mini_batch_is_packed_by_itself(seed):
    mini = np.random.default_rng(seed).permutation(np.arange(30) % 3)
    step = problem(mini, least=2, seed=seed)
    schedule = PLANNER._schedule(step)
    assert np.array_equal(schedule.mini_batch_of_sequence, mini)
    assert schedule.num_mini_batches == 3
    used = np.zeros((schedule.num_micro_batches, 2), np.int64)
    np.add.at(used, (schedule.micro_batch_of_sequence, schedule.rank_of_sequence), step.sequences.length_of_sequence)
    assert used.max() <= 60
    assert used.sum(axis=1).min() > 0, "an empty micro-batch"
    assert np.bincount(schedule.mini_batch_of_micro_batch).min() >= 2
    starts = np.flatnonzero(turn_in_mini_batch(schedule) == 0)
    assert schedule.mini_batch_of_micro_batch[starts].tolist() == [0, 1, 2]
    plan = PLANNER.plan(step)
    plan.check(step.load_under(plan.schedule), spare_slots=2)


def test_a_mini_batch_may_have_fewer_sequences_than_groups():
    schedule = PLANNER._schedule(problem([1, 0, 1, 1, 1, 1, 1], least=3))
    assert np.bincount(schedule.mini_batch_of_micro_batch).tolist() == [1, 3]


def test_one_mini_batch_is_packed_as_none_are():
    step = problem(np.zeros(12, np.int64))
    with_them, without = PLANNER._schedule(step), PLANNER._schedule(replace(step, mini_batch_of_sequence=None))
    assert np.array_equal(with_them.micro_batch_of_sequence, without.micro_batch_of_sequence)
    assert np.array_equal(with_them.rank_of_sequence, without.rank_of_sequence)
    assert without.num_mini_batches == 1
    assert not without.mini_batch_of_sequence.any()


def test_a_sequence_that_is_too_long_is_named_by_its_own_number():
    step = problem([0, 0, 1, 1])
    longest = int(step.sequences.length_of_sequence.argmax())
    with pytest.raises(BudgetError, match=f"sequence {longest} has"):
        PLANNER.plan(replace(step, tokens_per_rank=5))


@pytest.mark.parametrize(
    ("mini", "message"),
    [
        ([0, 0, 2, 2], "mini-batch 1 has no sequence on any rank, mini-batch 2 has"),
        ([1, 1, 1, 1], "mini-batch 0 has no sequence"),
        ([0, 2**40, 0, 0], "mini-batch 1 has no sequence"),
        ([0, -1, 0, 0], "4 sequences must be as many whole numbers from 0 on, .* from -1 on"),
        ([0.0, 1.0, 0.0, 1.0], "whole numbers from 0 on, not float64"),
        ([0, 1, 1], r"of 4 sequences must be as many .* \[3\]"),
        ([0, 1, 1, 1], "sequence 1 is in mini-batch 1, but the schedule puts it in mini-batch 0"),
    ],
)
def test_problems_check_mini_batches(mini, message):
    step = problem([0, 0, 1, 1])
    with pytest.raises(InputError, match=message):
        replace(step, mini_batch_of_sequence=np.array(mini))


def test_fixed_loads_have_no_mini_batches():
    load = StepLoad(tokens_MLER=np.ones((2, 2, 8, 2), np.int32))
    with pytest.raises(InputError, match="needs sequences and a schedule"):
        StepProblem(cluster=CLUSTER, given_load=load, rates=Rates.free(), mini_batch_of_sequence=np.zeros(2, np.int64))


@pytest.mark.parametrize("mini", [[0, 0], [0, 2, 2], [1, 1, 1], [0, 1, 0], [0.0, 0.0, 1.0]])
def test_schedules_check_mini_batches(mini):
    with pytest.raises(InputError, match="must rise from 0 without gaps"):
        Schedule(
            micro_batch_of_sequence=np.arange(3, dtype=np.int32), rank_of_sequence=np.zeros(3, np.int32),
            num_micro_batches=3, mini_batch_of_micro_batch=np.array(mini),
        )  # fmt: skip


def test_plans_keep_mini_batches_on_disk_and_in_their_digest(tmp_path):
    plan = PLANNER.plan(problem([0, 1, 0, 1, 2, 2, 0, 1]))
    save_plan(plan, tmp_path / "plan.npz")
    again = load_plan(tmp_path / "plan.npz")
    assert again.digest == plan.digest
    assert np.array_equal(again.schedule.mini_batch_of_sequence, [0, 1, 0, 1, 2, 2, 0, 1])
    assert replace(plan, schedule=replace(plan.schedule, mini_batch_of_micro_batch=None)).digest != plan.digest
