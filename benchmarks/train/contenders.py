"""The contenders of the training bench: learners with the same weights, each with its own runtime and optimizer.

static             the recorded routing, balancing switched off: contiguous homes, no copies, samples stay on the rank
                   that generated them
equilibra          the recorded routing, balanced by flash copies; homes stay, as always inside a node
equilibra-moves    the same without slots for copies, so homes move
balanced           other routing, balancing switched off: the same number of rows, but every token has as many experts
                   on each rank (`balanced_routing` of the runtime bench): the time of perfect balance
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.runtime.contenders import balanced_routing
from benchmarks.train.model import skew_routers
from benchmarks.train.setting import BALANCED, EQUILIBRA, MOVES, NAMES, PLANNED, TrainSetting
from equilibra.core.placement import Placement
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.step import Step
from equilibra.integrations.hf import ShardedModel
from equilibra.plan.planner import Planner, StepProblem, planner_named
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Learner
from equilibra.trace.routing import RoutingTrace
from equilibra.train.build import Parts, build_model_of


@dataclass(kw_only=True)
class Spent:
    """Seconds of the parts of beginning a step on this rank; every step sets them anew."""

    planner: float = 0.0
    """the planner itself, in the background"""
    prepare: float = 0.0
    """checking and gathering counts"""
    begin: float = 0.0
    """all of Balancer.begin; includes `prepare`, unless the step was prepared before"""


@dataclass(frozen=True, kw_only=True)
class TimedPlanner:
    """A planner that records how long it took."""

    planner: Planner
    """the planner"""
    spent: Spent
    """where to record"""

    @property
    def name(self) -> str:
        return self.planner.name

    def plan(self, problem: StepProblem) -> StepPlan:
        start = perf_counter()
        plan = self.planner.plan(problem)
        self.spent.planner = perf_counter() - start
        return plan


class TimedBalancer(Balancer):
    """A balancer that records how long it took."""

    def __init__(
        self, runtime: Runtime, setting: BalancerSetting, spent: Spent, *, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(runtime, setting, optimizer=optimizer)
        self.spent = spent

    def prepare(self, routing: RoutingTrace | None, mini_batches: NDArray[np.integer] | None = None) -> None:
        start = perf_counter()
        super().prepare(routing, mini_batches)
        self.spent.prepare = perf_counter() - start

    def begin(self, routing: RoutingTrace | None = None, mini_batches: NDArray[np.integer] | None = None) -> Step:
        start = perf_counter()
        step = super().begin(routing, mini_batches)
        self.spent.begin = perf_counter() - start
        return step


@dataclass(kw_only=True, eq=False)
class Contender:
    """One way to train."""

    name: str
    """one of NAMES"""
    learner: Learner
    model: ShardedModel
    """the learner's"""
    spent: Spent
    """recorded by the learner's balancer"""
    homes: Placement = field(init=False)
    """where homes are before the next step"""
    contiguous: Placement = field(init=False)
    """where homes were initially"""

    def __post_init__(self) -> None:
        self.homes = self.contiguous = self.model.runtime.placement

    def experts(self, samples: Sequence[Sample]) -> list[NDArray[np.int32]]:
        """[rows, L, K] routing of own samples that this contender replays."""
        recorded = [sample.experts for sample in samples]
        if self.name != BALANCED:
            return recorded
        pieces = [part.astype(np.int64) for part in recorded]
        (even,) = balanced_routing([pieces], self.model.runtime.spec.num_experts)
        return [part.astype(np.int32) for part in even]

    def rewind(self, homes: Placement | None = None) -> None:
        """Collective: restore the state before the step, so that it can run again, optionally with other homes."""
        gc.collect()
        self.learner.balancer.discard_gradients(self.model)
        self.learner.balancer.move_homes(homes or self.homes)

    def keep_homes(self) -> None:
        """Start the next step from the current homes."""
        self.homes = self.model.runtime.placement


def contenders(parts: Parts, setting: TrainSetting, rates: Rates) -> list[Contender]:
    """Collective: all of them."""
    config = parts.config
    without = replace(parts, config=replace(config, balance=replace(config.balance, spare_slots=0)))
    return [_contender(without if name == MOVES else parts, setting, rates, name) for name in NAMES]


def _contender(parts: Parts, setting: TrainSetting, rates: Rates, name: str) -> Contender:
    model, spent, config = build_model_of(parts), Spent(), parts.config
    skew_routers(model, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
    planner = TimedPlanner(planner=planner_named(EQUILIBRA if name in PLANNED else "static"), spent=spent)
    balance = BalancerSetting(
        tokens_per_rank=setting.tokens_per_rank, planner=planner, rates=rates, seed=setting.seed
    )  # fmt: skip
    learner = Learner(
        model=model, balancer=TimedBalancer(model.runtime, balance, spent, optimizer=optimizer), optimizer=optimizer,
        pad=parts.text.pad, device=parts.device, temperature=config.rollout.temperature,
        max_norm=config.optimizer.max_norm,
    )  # fmt: skip
    return Contender(name=name, learner=learner, model=model, spent=spent)
