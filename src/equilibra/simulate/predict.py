"""Predict: what the cost model says of a plan that a runtime executes, to stand beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equilibra.core.load import SequenceLoad
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates
from equilibra.measure.run import PlannerRecord
from equilibra.plan.planner import StepProblem, Timing
from equilibra.simulate.compare import step_metrics
from equilibra.simulate.record import planner_record
from equilibra.simulate.step import simulate_step
from equilibra.simulate.times import Pricing

__all__ = ["predict"]


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A planner that has one plan."""

    timing: ClassVar[Timing] = Timing.AHEAD

    given: StepPlan

    @property
    def name(self) -> str:
        """Of the planner that made it."""
        return self.given.planner

    def plan(self, problem: StepProblem) -> StepPlan:  # noqa: ARG002
        """The plan."""
        return self.given


def predict(
    plan: StepPlan, sequences: SequenceLoad, pricing: Pricing, *, spare_slots: int = 2, window: int | None = None
) -> PlannerRecord:
    """The record of a step that runs this plan; its token counts are those of the plan, exactly.

    The plan needs its schedule. window: the micro-batch whose events are kept, None for the one that waits most.
    """
    problem = StepProblem(
        cluster=plan.cluster, sequences=sequences, schedule=plan.schedule, previous=plan.previous, rates=Rates.free(),
        spare_slots=spare_slots,
    )  # fmt: skip
    result = simulate_step([problem], _Given(given=plan), pricing, window=window)
    metrics = step_metrics(result)
    return planner_record(result.groups[0], pricing, metrics)
