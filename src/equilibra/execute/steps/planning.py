"""How a step is planned: from the counts of all ranks' sequences to a plan, and the group that runs each micro-batch.

Nothing here talks to other ranks: every rank plans the same from the same counts, in the background.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import BudgetError, PlanError
from equilibra.core.limits import MOST_SLOTS
from equilibra.core.load import Schedule, StepLoad
from equilibra.core.placement import Placement, contiguous
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.rates import Rates
from equilibra.events.imbalance import static_imbalance
from equilibra.execute.group import ExpertGroup
from equilibra.execute.steps.counts import StepCounts
from equilibra.plan.pack import turn_in_mini_batch
from equilibra.plan.paths import late_stages
from equilibra.plan.planner import StepProblem
from equilibra.plan.setting import PlannerSetting

__all__ = ["BalancerSetting", "OwnSchedule", "PlannedStep", "own_schedule", "plan_of_counts"]

STATIC = "static"


@dataclass(frozen=True, kw_only=True)
class BalancerSetting(PlannerSetting):
    """How steps are planned. The same on every rank."""

    tokens_per_rank: int
    """token budget of a rank's part of a micro-batch"""
    spare_slots: int = MOST_SLOTS
    """flash copies that a plan may give a rank; never more than the runtime has slots (`CopySetting.spare_slots`)"""
    move_sequences: bool = True
    """whether sequences may run on other ranks than those that have them (their data is then sent there)"""
    migration_bytes: int = 256 << 20
    """memory that moving homes may take on a rank"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("tokens_per_rank", self.tokens_per_rank, low=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A plan, and what the runtime must know beside it."""

    plan: StepPlan
    """with a schedule"""
    group_of_micro_batch: NDArray[np.int64]
    """[M] the expert-parallel group that runs each"""
    static_imbalance: float
    """of the same sequences where the rollout left them, with contiguous homes and without copies"""
    load: StepLoad
    """what it was made for, under its schedule"""
    late: frozenset[Stage]
    """stages whose flash copies would come late over one link"""
    began: float
    """when planning began (perf_counter)"""
    ended: float
    """when it ended"""


def plan_of_counts(
    counts: StepCounts, previous: Placement, group: ExpertGroup, setting: BalancerSetting, rates: Rates
) -> PlannedStep:
    """The plan of a step; the same on every rank."""
    began = perf_counter()
    own = own_schedule(
        counts.sequences.length_of_sequence, counts.rank_of_sequence, counts.mini_batch_of_sequence,
        num_ranks=group.num_ranks, tokens_per_rank=setting.tokens_per_rank,
    )  # fmt: skip
    planner = setting.chosen_planner
    off = planner.name == STATIC
    layers, experts = counts.sequences.num_layers, counts.sequences.num_experts
    plain = contiguous(group.cluster, num_layers=layers, num_experts=experts)
    problem = StepProblem(
        cluster=group.cluster, sequences=counts.sequences, schedule=own.schedule,
        mini_batch_of_sequence=counts.mini_batch_of_sequence,
        tokens_per_rank=setting.tokens_per_rank if setting.move_sequences else None,
        least_micro_batches=group.num_groups, previous=plain if off else previous, rates=rates, **setting.limits(),
    )  # fmt: skip
    plan = planner.plan(problem)
    if off:
        plan = replace(plan, previous=previous)  # homes that have moved go back
    schedule = plan.schedule or own.schedule
    _check_mini_batches(planner.name, schedule, counts.mini_batch_of_sequence)
    plan, load = replace(plan, schedule=schedule), problem.load_under(schedule)
    return PlannedStep(
        plan=plan,
        group_of_micro_batch=_groups(schedule, own, group.num_groups),
        static_imbalance=static_imbalance(problem.load),
        load=load,
        late=late_stages(plan, load, rates),
        began=began,
        ended=perf_counter(),
    )


def _check_mini_batches(planner: str, schedule: Schedule, mini_batch_of_sequence: NDArray[np.int64]) -> None:
    """What an optimizer step learns from is no planner's business."""
    if not np.array_equal(schedule.mini_batch_of_sequence, mini_batch_of_sequence):
        raise PlanError(
            f"planner {planner} moved sequences to other mini-batches: it must pack each mini-batch by itself "
            "(equilibra.plan.pack.joined), or keep the given schedule"
        )


def _groups(schedule: Schedule, own: OwnSchedule, num_groups: int) -> NDArray[np.int64]:
    """[M] those of the own schedule if it was kept; else the groups take turns in every mini-batch."""
    if schedule is own.schedule or _same(schedule, own.schedule):
        return own.group_of_micro_batch
    return turn_in_mini_batch(schedule) % num_groups


def _same(one: Schedule, other: Schedule) -> bool:
    return np.array_equal(one.micro_batch_of_sequence, other.micro_batch_of_sequence) and np.array_equal(
        one.rank_of_sequence, other.rank_of_sequence
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnSchedule:
    """A schedule, and the expert-parallel group that runs each of its micro-batches."""

    schedule: Schedule
    """ranks are those of the expert-parallel group"""
    group_of_micro_batch: NDArray[np.int64]
    """[M]"""


def own_schedule(
    lengths: NDArray[np.int64], rank_of_sequence: NDArray[np.int64], mini_batch_of_sequence: NDArray[np.integer], *,
    num_ranks: int, tokens_per_rank: int,
) -> OwnSchedule:  # fmt: skip
    """Each world rank's sequences of a mini-batch in order, cell after cell.

    Of a mini-batch, a group has as many micro-batches as its fullest rank, so perhaps none.
    """
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, a rank's part of a micro-batch "
            f"{tokens_per_rank}: allow at least {lengths.max()}"
        )
    turn_of_sequence = np.zeros(lengths.size, np.int64)
    turn_of: Counter[tuple[int, int]] = Counter()
    used_of: Counter[tuple[int, int]] = Counter()
    cells = zip(rank_of_sequence.tolist(), mini_batch_of_sequence.tolist(), strict=True)
    for s, (length, cell) in enumerate(zip(lengths.tolist(), cells, strict=True)):
        if used_of[cell] + length > tokens_per_rank:
            turn_of[cell], used_of[cell] = turn_of[cell] + 1, 0
        turn_of_sequence[s] = turn_of[cell]
        used_of[cell] += length
    keys = np.stack([mini_batch_of_sequence, turn_of_sequence, rank_of_sequence // num_ranks])
    keys_of_micro_batch, number = np.unique(keys, axis=1, return_inverse=True)  # by mini-batch, turn, group: no gaps
    return OwnSchedule(
        schedule=Schedule(
            micro_batch_of_sequence=number.ravel().astype(np.int32),
            rank_of_sequence=(rank_of_sequence % num_ranks).astype(np.int32),
            num_micro_batches=keys_of_micro_batch.shape[1],
            mini_batch_of_micro_batch=keys_of_micro_batch[0].astype(np.int32),
        ),
        group_of_micro_batch=keys_of_micro_batch[2],
    )
