"""StepPlan.check finds every kind of wrong plan, and the digest sees every decision."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import Schedule, StepLoad
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)
HOMES = contiguous(CLUSTER, num_layers=2, num_experts=4)  # expert e at home on rank e
LOAD = StepLoad(tokens_MLER=np.full((3, 2, 4, 4), 10, np.int32))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def stage(**changes) -> StagePlan:
    """Layer 0, micro-batch 1: expert 0 copied from rank 0 to rank 1; a standing copy of expert 0 on rank 2."""
    standing_tokens = np.zeros((1, 3, 4), np.int32)
    standing_tokens[0, :, 2] = 4
    fields = {
        "first_of_problem": np.array([0, 0, 1, 1, 1, 1, 1]),
        "expert": ints(0),
        "rank": ints(1),
        "origin": ints(0),
        "tokens_FR": np.array([[0, 9, 0, 1]], np.int32),
        "standing_tokens_CMR": standing_tokens,
    }
    return StagePlan(**{**fields, **changes})


def plan(one: StagePlan | None = None, **changes) -> StepPlan:
    one = one or stage()
    fields = {
        "planner": "by hand",
        "placement": HOMES,
        "previous": HOMES,
        "standing": StandingCopies(layer=ints(0), expert=ints(0), rank=ints(2)),
        "stages": {Stage.LOGPROB: one, Stage.UPDATE: one},
        "bound_LM": np.full((2, 3), 40),
    }
    return StepPlan(**{**fields, **changes})


def test_a_right_plan_passes_and_its_loads_add_up():
    good = plan()
    good.check(LOAD, spare_slots=1)
    loads = good.rank_load(LOAD)
    assert loads[0].tolist() == [[36, 40, 44, 40], [26, 50, 44, 40], [36, 40, 44, 40]]
    assert loads[1].tolist() == [[40] * 4] * 3
    assert good.gap(LOAD) == pytest.approx((44 + 50 + 44 + 3 * 40) / 240 - 1)
    assert good.shape == (3, 2, 4, 4)


def test_the_plan_of_another_load_is_refused():
    other = StepLoad(tokens_MLER=np.full((2, 2, 4, 4), 10, np.int32))
    with pytest.raises(PlanError, match=r"\(3, 2, 4, 4\) does not fit loads of \(2, 2, 4, 4\)"):
        plan().check(other)
    with pytest.raises(InputError, match=r"\(3, 2, 4, 4\) was given loads of \(2, 2, 4, 4\)"):
        plan().rank_load(other)


def test_both_stages_are_needed():
    with pytest.raises(PlanError, match="logprob, update, not update"):
        plan(stages={Stage.UPDATE: stage()}).check(LOAD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_FR": np.zeros((2, 4), np.int32)}, r"tokens of 1 flash copies cannot be \(2, 4\)"),
        ({"tokens_FR": np.array([[0, -1, 0, 0]], np.int32)}, "flash copy serves a negative number"),
        ({"standing_tokens_CMR": np.full((1, 3, 4), -1, np.int32)}, "standing copy serves a negative number"),
        # 7 + 4 of the 10 tokens of source 2
        ({"tokens_FR": np.array([[0, 0, 7, 0]], np.int32)}, "layer 0, expert 0 serve 1 tokens more of source rank 2"),
        ({"rank": ints(0)}, "layer 0: rank 0 has expert 0 and gets a copy of it"),
        ({"rank": ints(2)}, "layer 0: rank 2 has expert 0 and gets a copy of it"),
        ({"origin": ints(3)}, "expert 0 is copied from rank 3, which lacks it"),
        (
            {
                "first_of_problem": np.array([0, 0, 2, 2, 2, 2, 2]),
                "expert": ints(0, 0),
                "rank": ints(1, 1),
                "origin": ints(0, 0),
                "tokens_FR": np.zeros((2, 4), np.int32),
            },
            "two flash copies of the same expert",
        ),
    ],
)
def test_a_wrong_stage_is_named(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(stage(**changes)).check(LOAD)


def test_a_standing_copy_at_home_is_refused():
    with pytest.raises(PlanError, match="has its expert already"):
        plan(standing=StandingCopies(layer=ints(0), expert=ints(0), rank=ints(0))).check(LOAD)


def test_more_copies_than_slots_are_refused():
    two = stage(
        first_of_problem=np.array([0, 2, 2, 2, 2, 2, 2]),
        expert=ints(0, 2),
        rank=ints(1, 1),
        origin=ints(0, 2),
        tokens_FR=np.zeros((2, 4), np.int32),
    )
    plan(two).check(LOAD)
    with pytest.raises(PlanError, match="a flash copy of expert 2 leaves its node: 2 to 1"):
        plan(two).check(LOAD, spare_slots=2)
    with pytest.raises(PlanError, match="needs 2 spare slots, 1 are allowed"):
        plan(two).check(LOAD, spare_slots=1)


def test_the_same_copies_in_two_micro_batches_share_the_slot():
    two = stage(
        first_of_problem=np.array([0, 1, 2, 2, 2, 2, 2]),
        expert=ints(0, 0),
        rank=ints(1, 1),
        origin=ints(0, 0),
        tokens_FR=np.zeros((2, 4), np.int32),
    )
    plan(two).check(LOAD, spare_slots=1)


def test_the_digest_sees_every_decision():
    schedule = Schedule(micro_batch_of_sequence=ints(0, 1), rank_of_sequence=ints(0, 1), num_micro_batches=3)
    swapped = replace(HOMES, home_of_expert=HOMES.home_of_expert[:, ::-1].copy())
    plans = [
        plan(),
        plan(planner="other"),
        plan(placement=swapped),
        plan(previous=swapped),
        plan(standing=StandingCopies(layer=ints(0), expert=ints(0), rank=ints(3))),
        plan(bound_LM=np.full((2, 3), 41)),
        plan(schedule=schedule),
        plan(schedule=replace(schedule, rank_of_sequence=ints(1, 0))),
        plan(schedule=replace(schedule, rank_of_sequence=ints(0, 2))),
        plan(schedule=replace(schedule, rank_of_sequence=ints(0, 2), ranks_per_sequence=2)),
        plan(stage(rank=ints(3))),
        plan(stage(origin=ints(2))),
        plan(stage(expert=ints(1))),
        plan(stage(tokens_FR=np.array([[0, 8, 0, 1]], np.int32))),
        plan(stage(first_of_problem=np.array([0, 1, 1, 1, 1, 1, 1]))),
        plan(stage(standing_tokens_CMR=np.zeros((1, 3, 4), np.int32))),
        plan(stages={Stage.LOGPROB: stage(), Stage.UPDATE: stage(tokens_FR=np.zeros((1, 4), np.int32))}),
    ]
    assert len({p.digest for p in plans}) == len(plans)
    assert plan().digest == plan().digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": ints(-1)}, "ranks of copies must be 0 to 3, not -1"),
        ({"rank": ints(99)}, "ranks of copies must be 0 to 3, not 99"),
        ({"expert": ints(4)}, "experts of copies must be 0 to 3"),
        ({"origin": ints(-2)}, "come from must be 0 to 3"),
        ({"expert": ints(0, 1)}, "int32 of one length"),
        ({"tokens_FR": np.zeros((1, 4))}, "must be int32, not float64"),
        ({"first_of_problem": np.array([0, 1])}, "in a plan for"),
        ({"first_of_problem": np.array([0, 1, 0, 1, 1, 1, 1])}, "must rise"),
        ({"first_of_problem": np.array([0, 0, 2, 2, 2, 2, 2])}, "must rise from 0 to the 1 flash copies"),
        ({"standing_tokens_CMR": np.zeros((0, 3, 4), np.int32)}, "in a plan for"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_when_it_is_made(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(stage(**changes))


def test_standing_slots_and_nodes_are_checked():
    made = plan()
    made.check(LOAD, spare_slots=1, standing_slots=1)
    with pytest.raises(PlanError, match="a node needs 1 standing slots in one layer, 0 are allowed"):
        made.check(LOAD, standing_slots=0)


def test_a_plan_cannot_be_changed():
    made = plan()
    for array in made.arrays().values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
