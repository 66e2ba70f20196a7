"""How a step is planned: from the counts of all ranks' sequences to a plan, and the group that runs each micro-batch.

Nothing here talks to other ranks: every rank plans the same from the same counts, in the background.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import Schedule, StepLoad
from equilibra.core.placement import Placement, contiguous
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates
from equilibra.events.imbalance import imbalance
from equilibra.execute.group import ExpertGroup
from equilibra.execute.steps.counts import StepCounts
from equilibra.execute.steps.own_schedule import OwnSchedule, own_schedule
from equilibra.plan.pack import turn_in_mini_batch
from equilibra.plan.planner import Planner, StepProblem, planner_named

__all__ = ["BalancerSetting", "Limits", "PlannedStep", "plan_of_counts"]

STATIC = "static"


@dataclass(frozen=True, kw_only=True)
class BalancerSetting:
    """How steps are planned. The same on every rank."""

    tokens_per_rank: int
    """token budget of a rank's part of a micro-batch"""
    planner: str | Planner = "equilibra"
    """"static" switches balancing off: contiguous homes, no copies"""
    standing_slots: int = 2
    """standing copies a node may hold per layer"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step, -1: as many as pay"""
    move_sequences: bool = True
    """whether sequences may run on other ranks than those that have them (their data is then sent there)"""
    rates: Rates | None = None
    """what rows, copies and moves cost; None: the model's experts on an H200"""
    migration_bytes: int = 256 << 20
    """memory that moving homes may take on a rank"""
    seed: int = 0
    """of every random choice of the planner"""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens_per_rank, int) or not 1 <= self.tokens_per_rank < 2**31:
            raise InputError(f"tokens_per_rank must be a whole number from 1 to 2^31 - 1, not {self.tokens_per_rank}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the model and its optimizer allow a plan."""

    rates: Rates
    """what rows, copies and moves cost"""
    spare_slots: int
    """flash copies a rank can hold"""
    homes_move: bool
    """whether an optimizer is attached whose state would move along"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A plan, and what the runtime must know beside it."""

    plan: StepPlan
    """with a schedule"""
    group_of_micro_batch: NDArray[np.int64]
    """[M] the expert-parallel group that runs each"""
    static_imbalance: float
    """of the same sequences where the rollout left them, with contiguous homes and without copies"""
    rates: Rates
    """prices that it was made for"""
    began: float
    """when planning began (perf_counter)"""
    ended: float
    """when it ended"""


def plan_of_counts(
    counts: StepCounts, previous: Placement, group: ExpertGroup, setting: BalancerSetting, limits: Limits
) -> PlannedStep:
    """The plan of a step; the same on every rank."""
    began = perf_counter()
    own = own_schedule(
        counts.sequences.length_of_sequence, counts.rank_of_sequence, counts.mini_batch_of_sequence,
        num_ranks=group.num_ranks, tokens_per_rank=setting.tokens_per_rank,
    )  # fmt: skip
    planner = planner_named(setting.planner) if isinstance(setting.planner, str) else setting.planner
    off = planner.name == STATIC
    layers, experts = counts.sequences.num_layers, counts.sequences.num_experts
    plain = contiguous(group.cluster, num_layers=layers, num_experts=experts)
    problem = StepProblem(
        cluster=group.cluster, sequences=counts.sequences, schedule=own.schedule,
        mini_batch_of_sequence=counts.mini_batch_of_sequence,
        tokens_per_rank=setting.tokens_per_rank if setting.move_sequences else None,
        least_micro_batches=group.num_groups, previous=plain if off else previous, spare_slots=limits.spare_slots,
        standing_slots=setting.standing_slots,
        max_moves_per_layer=setting.max_moves_per_layer if limits.homes_move else 0, rates=limits.rates,
        seed=setting.seed,
    )  # fmt: skip
    plan = planner.plan(problem)
    if off:
        plan = replace(plan, previous=previous)  # homes that have moved go back
    schedule = plan.schedule or own.schedule
    _check_mini_batches(planner.name, schedule, counts.mini_batch_of_sequence)
    return PlannedStep(
        plan=replace(plan, schedule=schedule),
        group_of_micro_batch=_groups(schedule, own, group.num_groups),
        static_imbalance=_static_imbalance(problem.load),
        rates=limits.rates,
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


def _static_imbalance(load: StepLoad) -> float:
    """Mean over layers and micro-batches of slowest over mean rank, when homes are contiguous and compute alone."""
    load_MLE = load.expert_load()
    load_MLR = load_MLE.reshape(*load_MLE.shape[:2], load.num_ranks, -1).sum(axis=3)
    return float(imbalance(load_MLR).mean())
