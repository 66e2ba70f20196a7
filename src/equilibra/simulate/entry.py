"""`simulate`: the whole question in one call. Routing, a model and a machine in, every planner's step out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import equilibra
from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.core.limits import PlanLimits
from equilibra.core.load import SequenceLoad
from equilibra.core.model import MoEModel
from equilibra.cost.prices import Prices
from equilibra.cost.rates import rates_for
from equilibra.events.run import Run
from equilibra.plan.planner import Planner
from equilibra.simulate.compare import BALANCED, DEFAULT_PLANNERS, STATIC, Comparison, compare
from equilibra.simulate.scenario import step_problems
from equilibra.simulate.setting import RunSetting
from equilibra.simulate.times import Pricing

__all__ = ["Answer", "Question", "simulate"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What would this step take on that cluster?"""

    sequences: SequenceLoad
    """loads of the step's sequences"""
    model: MoEModel
    """shapes"""
    hardware: Prices
    """speeds"""
    cluster: Cluster
    """one expert-parallel group"""
    tokens_per_microbatch: int
    """token budget of the whole group"""
    planners: Sequence[str | Planner] = DEFAULT_PLANNERS
    """what to compare; static and balanced always run"""
    limits: PlanLimits = field(default_factory=PlanLimits)
    """what plans may use"""
    setting: RunSetting = field(default_factory=RunSetting)
    """how the step is run"""
    ranks_per_sequence: int | None = None
    """ranks that share a sequence; None: those of a node, or of as few nodes as hold the longest"""
    history_LE: NDArray[np.int64] | None = None
    """[L, E] loads of the last step; None: the first half of this one stands for them"""

    def __post_init__(self) -> None:
        shape = (self.sequences.num_layers, self.sequences.num_experts)
        if shape != (self.model.num_layers, self.model.num_experts):
            raise InputError(
                f"the routing has {shape[0]} layers of {shape[1]} experts, {self.model.name} has "
                f"{self.model.num_layers} of {self.model.num_experts}"
            )
        if not 1 <= self.tokens_per_microbatch <= 2**40:
            raise InputError(f"tokens_per_microbatch must be from 1 to 2^40, not {self.tokens_per_microbatch}")
        if self.history_LE is not None and self.history_LE.shape != shape:
            raise InputError(f"the last step's routing is {self.history_LE.shape}, this step's {shape}")
        if self.setting.pipeline_stages > shape[0]:
            raise InputError(f"{shape[0]} layers cannot make {self.setting.pipeline_stages} pipeline stages: use fewer")
        self.cluster.experts_per_rank(self.model.num_experts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What each planner's step would take, and the run behind it."""

    metrics: dict[str, dict[str, float]]
    """figures by planner and name"""
    run: Run
    """what was asked, and what a report shows; without records if they were not kept"""


def simulate(
    question: Question,
    *,
    about: dict[str, Any] | None = None,
    keep_records: bool = True,
    tell: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
) -> Answer:
    """Answer a question. `about` is added to what the run says of itself; tell(name, done, all) comes before each."""
    pricing = Pricing(
        model=question.model, hardware=question.hardware, cluster=question.cluster, setting=question.setting
    )
    problems = step_problems(
        question.sequences,
        question.cluster,
        # without our kernels: a plan is to weigh what the step is charged for here, and the laws do not know of tiles
        # or of what moves beside a layer
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
    described["warnings"] = [*(about or {}).get("warnings", []), *_warnings(question, found)]
    return Answer(metrics=found.metrics, run=Run(about={**(about or {}), **described}, planners=found.records))


def _described(question: Question, *, ranks_per_sequence: int) -> dict[str, Any]:
    setting = {key: getattr(value, "value", value) for key, value in asdict(question.setting).items()}
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
            **setting,
        },
        "tokens": int(question.sequences.length_of_sequence.sum()),
        "sequences": question.sequences.num_sequences,
    }


def _flat(hardware: Prices, model: MoEModel) -> dict[str, Any]:
    """The hardware without tables in it; of the factors of shapes, the one for this model."""
    found: dict[str, Any] = {}
    for key, value in asdict(hardware.without_kernels()).items():
        if isinstance(value, dict):
            value["factor_of_shape"] = value["factor_of_shape"].get(f"{model.hidden}x{model.expert_ffn}", 1.0)
            found |= {f"{key}_{name}": constant for name, constant in value.items()}
        else:
            found[key] = value
    return found


def _warnings(question: Question, found: Comparison) -> list[str]:
    """What a reader must know before believing the figures."""
    lines = []
    memory = question.hardware.memory_bytes
    too_much = [name for name, figures in found.metrics.items() if figures["peak_memory_bytes"] > memory]
    if too_much:
        lines.append(
            f"{', '.join(too_much)} would need more than the {memory / 1e9:.0f} GB of {question.hardware.name}: "
            "use more ranks, pipeline stages, or smaller micro-batches"
        )
    static, ours = found.metrics[STATIC], found.metrics.get("equilibra", found.metrics[STATIC])
    if ours["speedup_over_static"] < 1:
        lines.append("equilibra would be slower than static placement here: leave it off for this run")
    if static["micro_batches"] < 4:
        lines.append(
            f"the recording makes only {static['micro_batches']:.0f} micro-batches of "
            f"{question.tokens_per_microbatch} tokens: what is paid once a step weighs more than in a long step"
        )
    if static["step_time_s"] < 1.02 * found.metrics[BALANCED]["step_time_s"]:
        lines.append("there is little to balance: static placement is within 2 % of perfect balance")
    return lines
