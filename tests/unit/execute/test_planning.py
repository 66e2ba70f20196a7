"""What a rank plans from counts alone: mini-batches, the groups that run them, and how even static would have been."""

import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import SequenceLoad, imbalance, step_load
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import GroupPlan, Stage
from equilibra.cost.rates import Rates
from equilibra.execute.group import ExpertGroup
from equilibra.execute.steps.balancer import BalancerSetting
from equilibra.execute.steps.planning import StepCounts, check_routing, own_schedule, plan_of_counts, warm
from equilibra.plan.baselines.fixed import Static

RANKS, GROUPS, EXPERTS, LAYERS = 2, 2, 8, 2
GROUP = ExpertGroup(cluster=Cluster(ranks_per_node=RANKS), num_groups=GROUPS, channels={})


def counts_of(mini, owner, seed=0):
    rng, owner = np.random.default_rng(seed), np.sort(np.asarray(owner))
    lengths = rng.integers(5, 20, owner.size)
    tokens = np.stack([rng.multinomial(2 * n, rng.dirichlet(np.full(EXPERTS, 0.3)), size=LAYERS) for n in lengths])
    return StepCounts(
        sequences=SequenceLoad(tokens_SLE=tokens.astype(np.int32), length_of_sequence=lengths.astype(np.int64)),
        unrecorded_of_sequence=np.zeros(owner.size, np.int64), mini_batch_of_sequence=np.asarray(mini),
        rank_of_sequence=owner,
    )  # fmt: skip


def planned(counts, planner="equilibra", **changes):
    setting = BalancerSetting(tokens_per_rank=24, planner=planner, spare_slots=2, **changes)
    previous = contiguous(GROUP.cluster, num_layers=LAYERS, num_experts=EXPERTS)
    return plan_of_counts(counts, previous, GROUP, setting, Rates.free())


def test_own_sequences_of_a_mini_batch_stay_together():
    lengths = np.array([6, 6, 6, 6, 6, 6, 6])
    owner = np.array([0, 0, 0, 0, 1, 2, 2])
    mini = np.array([1, 0, 1, 0, 1, 1, 1])
    own = own_schedule(lengths, owner, mini, num_ranks=2, tokens_per_rank=12)
    assert own.schedule.micro_batch_of_sequence.tolist() == [1, 0, 1, 0, 1, 2, 2]
    assert own.schedule.rank_of_sequence.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert own.schedule.mini_batch_of_micro_batch.tolist() == [0, 1, 1]
    assert own.group_of_micro_batch.tolist() == [0, 0, 1], "group 1 has none of mini-batch 0"
    narrow = own_schedule(lengths, owner, mini, num_ranks=2, tokens_per_rank=6)
    assert narrow.schedule.micro_batch_of_sequence.tolist() == [2, 0, 4, 1, 2, 3, 5]
    assert narrow.schedule.mini_batch_of_micro_batch.tolist() == [0, 0, 1, 1, 1, 1]
    assert narrow.group_of_micro_batch.tolist() == [0, 0, 0, 1, 0, 1]


def test_groups_take_turns_in_every_mini_batch():
    mini = np.array([2, *np.arange(23) % 2])
    step = planned(counts_of(mini, np.arange(24) % 4))
    schedule = step.plan.schedule
    assert np.array_equal(schedule.mini_batch_of_sequence, mini)
    for mini_batch in range(3):
        groups = step.group_of_micro_batch[schedule.mini_batch_of_micro_batch == mini_batch]
        assert groups.tolist() == (np.arange(groups.size) % GROUPS).tolist()
        assert (groups.size >= GROUPS) == (mini_batch < 2), "one sequence is one micro-batch"


@pytest.mark.parametrize("planner", ["equilibra", "static"])
def test_static_imbalance_is_that_of_the_static_planner(planner):
    counts = counts_of(np.arange(20) % 2, np.arange(20) % 4)
    step, static = planned(counts, planner), planned(counts, "static").plan
    load = step_load(counts.sequences, static.schedule, GROUP.cluster)
    wanted = np.mean([
        load.tokens_MLER[m, layer].sum(axis=1).reshape(RANKS, -1).sum(axis=1).max() * RANKS
        / load.tokens_MLER[m, layer].sum()
        for m in range(load.num_micro_batches) for layer in range(LAYERS)
    ])  # fmt: skip
    assert step.static_imbalance == pytest.approx(wanted)
    assert step.static_imbalance == pytest.approx(imbalance(static.rank_load(load)).mean())
    ours = imbalance(step.plan.rank_load(step_load(counts.sequences, step.plan.schedule, GROUP.cluster))).mean()
    assert (ours < step.static_imbalance - 0.1) == (planner == "equilibra")


@dataclass(frozen=True)
class Mixing:
    """A planner that forgets mini-batches."""

    name: str = "mixing"

    def plan(self, problem):
        plan = Static().plan(problem)
        mini = np.zeros_like(plan.schedule.mini_batch_of_micro_batch)
        return replace(plan, schedule=replace(plan.schedule, mini_batch_of_micro_batch=mini))


def test_planners_that_forget_mini_batches_are_refused():
    with pytest.raises(PlanError, match="planner mixing moved sequences to other mini-batches"):
        planned(counts_of([0, 1, 0, 1], [0, 1, 2, 3]), Mixing())
    planned(counts_of([0, 0, 0, 0], [0, 1, 2, 3]), Mixing())


def test_nothing_is_fetched_ahead_across_an_optimizer_step():
    step = planned(counts_of(np.arange(16) % 2, np.arange(16) % 4))
    load = step_load(counts_of(np.arange(16) % 2, np.arange(16) % 4).sequences, step.plan.schedule, GROUP.cluster)
    armed = GroupPlan(plan=step.plan, load=load, micro_batches=list(range(step.plan.num_micro_batches)))
    mini = step.plan.schedule.mini_batch_of_micro_batch
    for m in armed.micro_batches[:-1]:
        assert armed.after(Stage.LOGPROB, m) == m + 1
        assert armed.after(Stage.UPDATE, m) == (m + 1 if mini[m] == mini[m + 1] else None)
    assert armed.after(Stage.LOGPROB, armed.micro_batches[-1]) is None
    assert np.diff(mini).any()
    plain = replace(step.plan, schedule=replace(step.plan.schedule, mini_batch_of_micro_batch=None))
    assert replace(armed, plan=plain).after(Stage.UPDATE, 0) == 1


def test_a_rank_may_have_some_mini_batches_only():
    model = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": 2}
    check_routing(None, np.zeros(0, np.int64), **model)
    with pytest.raises(InputError, match="of 0 sequences must be as many"):
        check_routing(None, np.zeros(1, np.int64), **model)


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_process_that_has_compiled_the_planner_may_fork(num_nodes):
    before = set(threading.enumerate())
    warm(num_nodes)
    assert set(threading.enumerate()) == before
