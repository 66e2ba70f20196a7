"""Compare: the same step under several planners, and what each would gain.

`static` always runs, for the speedups are over it. `balanced` is not a plan but a bound: of all compared plans, the one
that would be fastest if experts and their traffic were even over the ranks and nothing had to be planned, copied or
exchanged. So no compared plan is faster, and its figures say nothing about copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from equilibra.core.plan import Stage
from equilibra.events.imbalance import spread
from equilibra.events.run import PlannerRecord
from equilibra.plan.planner import Planner, StepProblem, planner_named
from equilibra.simulate.record import balanced_record, planner_record
from equilibra.simulate.step import StepResult, simulate_step
from equilibra.simulate.times import Pricing

__all__ = ["BALANCED", "DEFAULT_PLANNERS", "STATIC", "Comparison", "compare", "step_metrics"]

STATIC, BALANCED = "static", "balanced"
DEFAULT_PLANNERS = (STATIC, "eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra", BALANCED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What came out, by planner."""

    metrics: dict[str, dict[str, float]]
    """figures by planner and name"""
    records: dict[str, PlannerRecord] = field(default_factory=dict)
    """what a report shows, by planner; empty if it was not asked for"""


@dataclass
class _Best:
    """The fastest ideal so far."""

    seconds: float = float("inf")
    metrics: dict[str, float] = field(default_factory=dict)
    record: PlannerRecord | None = None


def compare(
    problems: Sequence[StepProblem],
    planners: Sequence[str | Planner],
    pricing: Pricing,
    *,
    keep_records: bool = False,
    tell: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
) -> Comparison:
    """Run the step under each planner, one after another so that one plan is in memory at a time.

    tell(name, done, all) is called before each planner.
    """
    named = [planner_named(planner) if isinstance(planner, str) else planner for planner in planners]
    plans = [planner for planner in named if planner.name not in (STATIC, BALANCED)]
    plans.insert(0, planner_named(STATIC))
    metrics: dict[str, dict[str, float]] = {}
    records: dict[str, PlannerRecord] = {}
    best = _Best()
    for number, planner in enumerate(plans):
        tell(planner.name, number, len(plans))
        result = simulate_step(problems, planner, pricing)
        metrics[planner.name] = step_metrics(result)
        if keep_records:
            records[planner.name] = planner_record(result.groups[0], pricing, metrics[planner.name])
        if result.ideal_s < best.seconds:
            best.seconds, best.metrics = result.ideal_s, _balanced_metrics(result)
            best.record = balanced_record(result.groups[0], pricing, best.metrics) if keep_records else None
    metrics[BALANCED] = best.metrics
    if best.record is not None:
        records[BALANCED] = best.record
    for figures in metrics.values():
        figures["speedup_over_static"] = metrics[STATIC]["step_time_s"] / figures["step_time_s"]
        figures["share_of_balanced"] = best.seconds / figures["step_time_s"]
    return Comparison(metrics=metrics, records=records)


def step_metrics(result: StepResult) -> dict[str, float]:
    """Figures of one planner's step by name; those that compare it with others are 1."""
    groups = result.groups
    problems = sum(group.plan.num_layers * group.plan.num_micro_batches for group in groups)
    layers = sum(group.plan.num_layers for group in groups)
    flash = sum(group.plan.stages[Stage.UPDATE].num_copies for group in groups) / problems
    standing = sum(group.plan.standing.num_copies for group in groups) / layers
    ratio = spread(result.imbalances())
    bound = sum(float(group.plan.bound_LM.sum()) for group in groups)
    slowest = sum(float(group.plan.rank_load(group.load).max(axis=2).sum()) for group in groups)
    return {
        "step_time_s": result.step_s,
        "throughput_tokens_per_s": result.num_tokens / result.step_s,
        "speedup_over_static": 1.0,  # both are filled in when all planners are through
        "share_of_balanced": 1.0,
        "imbalance_mean": ratio.mean,
        "imbalance_p99": ratio.p99,
        "slowest_rank_over_bound": slowest / bound if bound else 1.0,
        "copies_per_layer": flash + standing,
        "flash_copies_per_layer": flash,
        "standing_copies_per_layer": standing,
        "copy_bytes": sum(group.copy_bytes for group in groups),
        "migration_bytes": sum(group.migration_bytes for group in groups),
        "exposed_overhead_s": result.exposed_s,
        "peak_memory_bytes": max(sum(group.memory.values()) for group in groups),
        "micro_batches": float(np.mean([group.plan.num_micro_batches for group in groups])),
    }


def _balanced_metrics(result: StepResult) -> dict[str, float]:
    nothing = ("copies_per_layer", "flash_copies_per_layer", "standing_copies_per_layer", "copy_bytes",
               "migration_bytes", "exposed_overhead_s")  # fmt: skip
    return {
        **step_metrics(result),
        **dict.fromkeys(nothing, 0.0),
        "step_time_s": result.ideal_s,
        "throughput_tokens_per_s": result.num_tokens / result.ideal_s,
        "imbalance_mean": 1.0,
        "imbalance_p99": 1.0,
        "slowest_rank_over_bound": 1.0,
        "peak_memory_bytes": max(sum(group.ideal_memory.values()) for group in result.groups),
    }
