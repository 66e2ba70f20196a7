"""`simulate`: routing, a model and a machine in, every planner's step out. `predict`: one given plan in, its step out.

`static` always runs: speedups are relative to it. `balanced` is a bound and not a plan: the fastest compared plan with
experts and traffic even over the ranks, and planning, copies and exchanges free. Its figures say nothing about copies.

`beside` sets a measured step beside its prediction. Constants that the measured step determines are fitted to it, so
the prediction tests whether times follow from rows and bytes as the cost model says, not how fast the machine is:

    records = beside(measured, plan, sequences, pricing)       # {"equilibra": measured, "predicted": ...}
    save_run(Run(about={"kind": "measured"}, planners=records), "step.run")        # then: equilibra report step.run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import equilibra
from equilibra.core.checks import PlanLimits, check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, spread
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.calibrate import calibrate, measurements_of_run
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for
from equilibra.events.run import PlannerRecord, Run
from equilibra.plan.planner import Planner, StepProblem, Timing, planner_named
from equilibra.simulate.record import balanced_record, planner_record
from equilibra.simulate.scenario import step_problems
from equilibra.simulate.step import StepResult, simulate_step
from equilibra.simulate.times import Pricing, RunSetting

STATIC, BALANCED, PREDICTED = "static", "balanced", "predicted"
DEFAULT_PLANNERS = (STATIC, "eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra", BALANCED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What to simulate: a step, a cluster, planners, and how the step is run."""

    sequences: SequenceLoad
    """loads of the step's sequences"""
    model: MoEModel
    hardware: Prices
    cluster: Cluster
    """ranks of one expert-parallel group"""
    tokens_per_microbatch: int
    """token budget of the whole group"""
    planners: Sequence[str | Planner] = DEFAULT_PLANNERS
    """planners to compare; static and balanced always run"""
    limits: PlanLimits = field(default_factory=PlanLimits)
    """slots and moves plans may use"""
    setting: RunSetting = field(default_factory=RunSetting)
    ranks_per_sequence: int | None = None
    """ranks that share a sequence; None: a node, or as few nodes as hold the longest sequence"""
    history_LE: NDArray[np.int64] | None = None
    """[L, E] loads of the previous step; None: the first half of this step"""

    def __post_init__(self) -> None:
        shape = (self.sequences.num_layers, self.sequences.num_experts)
        if shape != (self.model.num_layers, self.model.num_experts):
            raise InputError(
                f"the routing has {shape[0]} layers of {shape[1]} experts, {self.model.name} has "
                f"{self.model.num_layers} of {self.model.num_experts}; name the model it was recorded from"
            )
        check_whole("tokens_per_microbatch", self.tokens_per_microbatch, low=1, high=2**40)
        if self.history_LE is not None and self.history_LE.shape != shape:
            raise InputError(f"history_LE has shape {self.history_LE.shape}, but this step's routing needs {shape}")
        self.cluster.experts_per_rank(self.model.num_experts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Metrics of each planner's step, and the run for a report."""

    metrics: dict[str, dict[str, float]]
    """figures by planner and name"""
    run: Run
    """the question and, if kept, the planners' records"""


def simulate(
    question: Question,
    *,
    about: dict[str, Any] | None = None,
    keep_records: bool = True,
    tell: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
) -> Answer:
    """Compare the planners. `about` is added to what the run says of itself; `tell` is that of `compare`."""
    pricing = Pricing(
        model=question.model, hardware=question.hardware, cluster=question.cluster, setting=question.setting
    )
    problems = step_problems(
        question.sequences,
        question.cluster,
        # without our kernels: the plan must count what the simulator charges, which has no tiles or background moves
        rates_for(question.model, question.hardware.without_kernels(), num_nodes=question.cluster.num_nodes),
        tokens_per_microbatch=question.tokens_per_microbatch,
        ranks_per_sequence=question.ranks_per_sequence,
        history_LE=question.history_LE,
        limits=question.limits,
        data_parallel=question.setting.data_parallel,
        optimizer_steps=question.setting.optimizer_steps,
    )
    found = compare(problems, question.planners, pricing, keep_records=keep_records, tell=tell)
    schedule = problems[0].schedule
    assert schedule is not None
    described = _described(question, ranks_per_sequence=schedule.ranks_per_sequence)
    about = about or {}
    described["warnings"] = [*about.get("warnings", []), *_warnings(question, found.metrics)]
    return replace(found, run=replace(found.run, about={**about, **described}))


def _described(question: Question, *, ranks_per_sequence: int) -> dict[str, Any]:
    group = question.cluster.num_ranks
    return {
        "kind": "simulated",
        "version": equilibra.__version__,
        "model": asdict(question.model),
        "hardware": _flat(question.hardware, question.model),
        "cluster": asdict(question.cluster),
        "ranks": group * question.setting.data_parallel * question.setting.pipeline_stages,
        "settings": {
            "tokens_per_microbatch": question.tokens_per_microbatch,
            "ranks_per_sequence": ranks_per_sequence,
            "spare_slots": question.limits.spare_slots,
            "standing_slots": question.limits.standing_slots,
            **asdict(question.setting),
        },
        "tokens": int(question.sequences.length_of_sequence.sum()),
        "sequences": question.sequences.num_sequences,
    }


def _flat(hardware: Prices, model: MoEModel) -> dict[str, Any]:
    """The prices as one flat table, with only this model's shape factor."""
    found: dict[str, Any] = {}
    for key, value in asdict(hardware.without_kernels()).items():
        if isinstance(value, dict):
            value["factor_of_shape"] = value["factor_of_shape"].get(f"{model.hidden}x{model.expert_ffn}", 1.0)
            found |= {f"{key}_{name}": constant for name, constant in value.items()}
        else:
            found[key] = value
    return found


def _warnings(question: Question, metrics: dict[str, dict[str, float]]) -> list[str]:
    """Caveats a reader needs before trusting the figures."""
    lines = []
    memory = question.hardware.memory_bytes
    too_much = [name for name, figures in metrics.items() if figures["peak_memory_bytes"] > memory]
    if too_much:
        lines.append(
            f"{', '.join(too_much)} would exceed the {memory / 1e9:.0f} GB of {question.hardware.name}: "
            "use more ranks, pipeline stages, or smaller micro-batches"
        )
    static, ours = metrics[STATIC], metrics.get("equilibra", metrics[STATIC])
    if ours["speedup_over_static"] < 1:
        lines.append("equilibra would be slower than static placement here: leave it off for this run")
    if static["micro_batches"] < 4:
        lines.append(
            f"the recording makes only {static['micro_batches']:.0f} micro-batches of "
            f"{question.tokens_per_microbatch} tokens: once-a-step costs weigh more than in a long step"
        )
    if static["step_time_s"] < 1.02 * metrics[BALANCED]["step_time_s"]:
        lines.append("there is little to balance: static placement is within 2 % of perfect balance")
    return lines


def compare(
    problems: Sequence[StepProblem],
    planners: Sequence[str | Planner],
    pricing: Pricing,
    *,
    keep_records: bool = False,
    tell: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
) -> Answer:
    """Simulate the step under each planner, one plan in memory at a time; tell(name, done, all) comes before each."""
    named = [planner_named(planner) if isinstance(planner, str) else planner for planner in planners]
    plans = [planner_named(STATIC), *(planner for planner in named if planner.name not in (STATIC, BALANCED))]
    metrics: dict[str, dict[str, float]] = {}
    records: dict[str, PlannerRecord] = {}
    best_s = float("inf")
    for number, planner in enumerate(plans):
        tell(planner.name, number, len(plans))
        result = simulate_step(problems, planner, pricing)
        metrics[planner.name] = step_metrics(result)
        if keep_records:
            records[planner.name] = planner_record(result.groups[0], pricing, metrics[planner.name])
        if result.ideal_s < best_s:
            best_s, balanced = result.ideal_s, _balanced_metrics(result)
            if keep_records:
                best_record = balanced_record(result.groups[0], pricing, balanced)
    metrics[BALANCED] = balanced
    if keep_records:
        records[BALANCED] = best_record
    for figures in metrics.values():  # the records hold the same tables
        figures["speedup_over_static"] = metrics[STATIC]["step_time_s"] / figures["step_time_s"]
        figures["share_of_balanced"] = best_s / figures["step_time_s"]
    return Answer(metrics=metrics, run=Run(about={}, planners=records))


def step_metrics(result: StepResult) -> dict[str, float]:
    """Metrics of one planner's step."""
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


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A planner that returns a given plan."""

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
    """The record of a step simulated under this plan and its schedule; window: micro-batch to record (None: worst)."""
    problem = StepProblem(
        cluster=plan.cluster, sequences=sequences, schedule=plan.schedule, previous=plan.previous, rates=Rates.free(),
        spare_slots=spare_slots,
    )  # fmt: skip
    result = simulate_step([problem], _Given(given=plan), pricing, window=window)
    return planner_record(result.groups[0], pricing, step_metrics(result))


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
