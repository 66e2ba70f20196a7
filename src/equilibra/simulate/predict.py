"""Predict: simulate the plan a runtime executed, to compare with what was measured.

    records = beside(measured, plan, sequences, pricing)       # {"equilibra": measured, "predicted": ...}
    save_run(Run(about={"kind": "measured"}, planners=records), "step.run")        # then: equilibra report step.run

Constants that the measured step determines are fitted to it, so the prediction tests whether times follow from rows and
bytes as the cost model says, not how fast the machine is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad
from equilibra.core.plan import StepPlan
from equilibra.cost.calibrate import calibrate, measurements_of_run
from equilibra.cost.rates import Rates
from equilibra.events.run import PlannerRecord
from equilibra.plan.planner import StepProblem, Timing
from equilibra.simulate.entry import step_metrics
from equilibra.simulate.record import planner_record
from equilibra.simulate.step import simulate_step
from equilibra.simulate.times import Pricing

__all__ = ["beside", "predict"]

PREDICTED = "predicted"


@dataclass(frozen=True, kw_only=True)
class _Given:
    timing: ClassVar[Timing] = Timing.AHEAD

    given: StepPlan

    @property
    def name(self) -> str:
        return self.given.planner

    def plan(self, problem: StepProblem) -> StepPlan:  # noqa: ARG002
        return self.given


def predict(
    plan: StepPlan, sequences: SequenceLoad, pricing: Pricing, *, spare_slots: int = 2, window: int | None = None
) -> PlannerRecord:
    """The record of a simulated step under this plan and its schedule; window: micro-batch to record (None: worst)."""
    problem = StepProblem(
        cluster=plan.cluster, sequences=sequences, schedule=plan.schedule, previous=plan.previous, rates=Rates.free(),
        spare_slots=spare_slots,
    )  # fmt: skip
    result = simulate_step([problem], _Given(given=plan), pricing, window=window)
    metrics = step_metrics(result)
    for compared in ("speedup_over_static", "share_of_balanced"):
        del metrics[compared]
    return planner_record(result.groups[0], pricing, metrics)


def beside(
    measured: PlannerRecord, plan: StepPlan, sequences: SequenceLoad, pricing: Pricing
) -> dict[str, PlannerRecord]:
    """The measured step, and the prediction for its plan by a cost model fitted to it."""
    experts_per_rank = plan.placement.num_experts // plan.cluster.num_ranks
    cases = measurements_of_run(pricing.model, measured.events, experts_per_rank=experts_per_rank)
    hardware = pricing.hardware
    for kind in dict.fromkeys(case["kind"] for case in cases):
        about_kind = [case for case in cases if case["kind"] == kind]
        with suppress(InputError):  # too few or too noisy for a fit: keep the constants
            hardware = calibrate(about_kind, hardware, name="measured", source="fitted to the step beside it").hardware
    window = int(measured.events.rows["micro_batch"].max(initial=0))
    predicted = predict(plan, sequences, replace(pricing, hardware=hardware), window=window)
    return {plan.planner: measured, PREDICTED: predicted}
