"""Simulate one step under one planner: plan, price, run.

Under data parallelism every group plans for its own sequences, and the slowest group sets the pace. Metrics cover all
groups, records only the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import Schedule, StepLoad, imbalance
from equilibra.core.plan import Stage, StepPlan
from equilibra.plan.planner import Planner, StepProblem, Timing, online_us_of, timing_of
from equilibra.simulate.timeline import GroupTimeline, run_group
from equilibra.simulate.times import Pricing, Times, cell_work, ideal, price
from equilibra.simulate.work import layer_moves, memory_need, stage_work


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupResult:
    """Simulated step of one expert-parallel group."""

    plan: StepPlan
    load: StepLoad
    """the load under the plan's schedule"""
    times: Times
    timeline: GroupTimeline
    free_timeline: GroupTimeline
    """the same balance without overhead"""
    ideal_times: Times
    """experts and traffic even over the ranks, without overhead"""
    ideal_timeline: GroupTimeline
    memory: dict[str, float]
    """bytes by kind on the rank that needs most"""
    ideal_memory: dict[str, float]
    """bytes by kind if every rank had the mean load"""
    copy_bytes: float
    """weights and gradients of copies on all ranks"""
    migration_bytes: float
    """weights and state of homes that moved"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Simulated step of one planner."""

    groups: list[GroupResult]
    """by data-parallel group"""
    num_tokens: int
    """tokens of all groups"""

    @property
    def step_s(self) -> float:
        """Duration of the step; groups wait for each other at every optimizer step."""
        return _together_s([group.timeline for group in self.groups])

    @property
    def ideal_s(self) -> float:
        """Duration with experts and traffic even over the ranks of every group."""
        return _together_s([group.ideal_timeline for group in self.groups])

    @property
    def exposed_s(self) -> float:
        """Time that planning, copies, moves and exchanged counts add to the step."""
        return self.step_s - _together_s([group.free_timeline for group in self.groups])

    def imbalances(self) -> NDArray[np.float64]:
        return np.concatenate([imbalance(group.plan.rank_load(group.load)).ravel() for group in self.groups])


def _together_s(timelines: Sequence[GroupTimeline]) -> float:
    """Seconds of the slowest group, summed over optimizer steps."""
    took_us = np.zeros((len(timelines), max(timeline.optimizer_ends_us.size for timeline in timelines)))
    for took, timeline in zip(took_us, timelines, strict=True):
        took[: timeline.optimizer_ends_us.size] = np.diff(timeline.optimizer_ends_us, prepend=0.0)
    return float(took_us.max(axis=0).sum()) * 1e-6


def simulate_step(
    problems: Sequence[StepProblem], planner: Planner, pricing: Pricing, *, window: int | None = None
) -> StepResult:
    """Simulate the step of all groups; `window` is the micro-batch to record, None for the least balanced one."""
    return StepResult(
        groups=[simulate_group(problem, planner, pricing, window=window) for problem in problems],
        num_tokens=sum(int(one.sequences.length_of_sequence.sum()) for one in problems if one.sequences is not None),
    )


def simulate_group(
    problem: StepProblem, planner: Planner, pricing: Pricing, *, window: int | None = None
) -> GroupResult:
    """Plan and simulate one group."""
    assert problem.sequences is not None
    plan = planner.plan(problem)
    load = problem.load_under(plan.schedule)
    schedule = plan.schedule or problem.schedule
    assert isinstance(schedule, Schedule)
    cells = cell_work(problem.sequences.length_of_sequence, schedule, problem.cluster)
    logprob = update = stage_work(plan, load, Stage.UPDATE)
    if plan.stages[Stage.LOGPROB] is not plan.stages[Stage.UPDATE]:
        logprob = stage_work(plan, load, Stage.LOGPROB)
    work = {Stage.LOGPROB: logprob, Stage.UPDATE: update}
    moves = layer_moves(plan)
    timing = timing_of(planner)
    times = price(
        pricing, plan, work, moves, cells,
        timing=timing, online_us=online_us_of(planner), num_sequences=problem.sequences.num_sequences,
    )  # fmt: skip
    if window is None:
        window = int(imbalance(update.rows_LMR).mean(axis=0).argmax())
    ideal_times = ideal(pricing, times, work)
    slots, standing = _slots(pricing, plan, timing, problem.spare_slots), int(moves.standing_of_rank.max())
    even_MR, even_LMR = cells.tokens_MR.mean(axis=1, keepdims=True), update.rows_LMR.mean(axis=2, keepdims=True)
    return GroupResult(
        plan=plan,
        load=load,
        times=times,
        timeline=run_group(times, pricing.setting, window=window),
        free_timeline=run_group(times.without_overhead(), pricing.setting),
        ideal_times=ideal_times,
        ideal_timeline=run_group(ideal_times, pricing.setting, window=window),
        memory=_memory(pricing, cells.tokens_MR, update.rows_LMR, slots=slots, standing=standing),
        ideal_memory=_memory(pricing, even_MR, even_LMR, slots=0, standing=0),
        copy_bytes=_copy_bytes(pricing, plan),
        migration_bytes=float(plan.migration.num_moves * pricing.model.expert_home_bytes),
    )


def _copy_bytes(pricing: Pricing, plan: StepPlan) -> float:
    """Flash copies are fetched forward and backward and return gradients; standing ones move once an optimizer step."""
    model, setting = pricing.model, pricing.setting
    logprob = plan.stages[Stage.LOGPROB].num_copies * setting.logprob_stage
    update = plan.stages[Stage.UPDATE].num_copies
    flash = (logprob + 2 * update) * model.expert_bytes + update * model.expert_gradient_bytes
    standing = plan.standing.num_copies * (model.expert_bytes + model.expert_gradient_bytes) * setting.optimizer_steps
    return float(flash + standing)


def _slots(pricing: Pricing, plan: StepPlan, timing: Timing, spare_slots: int) -> int:
    """Spare slots of all buffers: online planners fetch into one, others prefetch."""
    update = plan.stages[Stage.UPDATE]
    if not update.num_copies:
        return 0
    buffers = 1 if timing is Timing.ONLINE else 1 + pricing.setting.prefetch_depth
    return max(int(update.on_links()[0].max()), spare_slots) * buffers


def _memory(
    pricing: Pricing, tokens_MR: NDArray[np.float64], rows_LMR: NDArray[np.float64], *, slots: int, standing: int
) -> dict[str, float]:
    """Memory of the fullest rank, with `standing` standing copies in all pipeline stages."""
    model, setting, cluster = pricing.model, pricing.setting, pricing.cluster
    return memory_need(
        model,
        tokens_MR,
        rows_LMR,
        layers=-(-model.num_layers // setting.pipeline_stages),
        experts_at_home=model.num_experts // cluster.num_ranks,
        dense_replicas=cluster.num_ranks * setting.data_parallel,
        expert_replicas=setting.data_parallel,
        slots_in_flight=slots,
        standing_copies=-(-standing // setting.pipeline_stages),
        micro_batches_in_flight=min(setting.pipeline_stages, len(tokens_MR)),
        activation_recompute=setting.activation_recompute,
    )
