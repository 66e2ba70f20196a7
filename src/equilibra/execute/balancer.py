"""Balancer: what a training loop holds. Routing of a step in, micro-batches to run out.

    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=8192), optimizer=optimizer)
    step = balancer.begin(routing)                      # collective: counts, plan, moved homes, copies
    data = step.send(own_data)                          # sequences' data to the ranks that run them
    for micro_batch in step.micro_batches(Stage.UPDATE):
        with micro_batch:
            loss_of(micro_batch).backward()
    balancer.finish_gradients(model)                    # then clip, optimizer.step()

Every rank plans from the same counts and so makes the same plan; ranks compare its hash before they use it. A failure
anywhere is an error everywhere within the group's timeout. `planner="static"` is the switch: contiguous homes, no
copies.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.model import MoEModel
from equilibra.core.placement import Placement, contiguous
from equilibra.core.plan import StepPlan
from equilibra.core.schedule import Schedule
from equilibra.cost.rates import Rates, rates_for
from equilibra.execute.counts import StepCounts, gather_counts, recorded_experts
from equilibra.execute.gradients import dense_parameters, sum_dense_gradients
from equilibra.execute.migrate import migrate, optimizer_tensors
from equilibra.execute.own_schedule import own_schedule
from equilibra.execute.runtime import Runtime
from equilibra.execute.step import Step, begin_step
from equilibra.execute.visit import Where
from equilibra.measure.events import Direction, Kind, Resource, StageNumber
from equilibra.plan.planner import Planner, StepProblem, planner_named
from equilibra.trace.routing import RoutingTrace

__all__ = ["Balancer", "BalancerSetting"]

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
        if not 1 <= self.tokens_per_rank < 2**31:
            raise InputError(f"tokens_per_rank must be a whole number from 1 to 2^31 - 1, not {self.tokens_per_rank}")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ahead:
    """A step whose counts are gathered and whose plan is made in the background."""

    experts_TLK: NDArray[np.int32]
    lengths: NDArray[np.int64]
    counts: StepCounts
    previous: Placement
    plan: Future[tuple[StepPlan, NDArray[np.int64], float, float]]


class Balancer:
    """Plans, moves and arms; one per model and rank."""

    def __init__(
        self, runtime: Runtime, setting: BalancerSetting, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.runtime, self.setting, self.optimizer = runtime, setting, optimizer
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="equilibra-plan")
        self._ahead: _Ahead | None = None
        self._optimizer_began = 0.0
        self._rates = setting.rates or rates_for(_model_of(runtime), num_nodes=runtime.group.cluster.num_nodes)
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_optimizer)
            optimizer.register_step_post_hook(self._after_optimizer)

    # --- plans ---

    def prepare(self, routing: RoutingTrace | None) -> None:
        """Collective: gather the next step's counts, and plan it in the background while this one runs.

        routing: the recording of this rank's own sequences; None if it has none.
        """
        if self._ahead is not None:
            raise InputError("a step is prepared already: begin() it first")
        runtime, spec = self.runtime, self.runtime.spec
        experts = np.zeros((0, len(runtime.weights), spec.top_k), np.int32)
        if routing is not None:
            experts = recorded_experts(routing)
        counts = gather_counts(
            runtime.group, routing, experts, num_layers=len(runtime.weights), num_experts=spec.num_experts
        )
        lengths = np.zeros(0, np.int64) if routing is None else routing.length_of_sequence
        previous = runtime.placement
        self._ahead = _Ahead(
            experts_TLK=experts, lengths=lengths, counts=counts, previous=previous,
            plan=self._planning.submit(self._plan, counts, previous),
        )  # fmt: skip

    def begin(self, routing: RoutingTrace | None = None) -> Step:
        """Collective: plan (or take the prepared plan), move homes, arm; returns the step to run.

        Without routing the prepared step begins, or a step whose sequences are all on other ranks.
        """
        if self._ahead is None:
            self.prepare(routing)
        elif routing is not None:
            raise InputError("a step is prepared already: begin() it without routing")
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        runtime, group = self.runtime, self.runtime.group
        group.all_succeed(lambda: _ignore(ahead.plan.result()), what="planning the step")
        plan, group_of_micro_batch, started, ended = ahead.plan.result()
        group.agree(f"plan {plan.digest}", what="the plan of the step")
        runtime.disarm()
        group.barrier(what="beginning the step")
        runtime.recorder.begin_step()
        waited = max(ended - runtime.recorder.began, 0.0)
        where = Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=-1)
        runtime.recorder.add(
            Kind.PLAN, Resource.CPU, where, Direction.FORWARD, runtime.recorder.began,
            runtime.recorder.began + min(waited, ended - started),
        )  # fmt: skip
        if plan.migration.num_moves:
            carried = optimizer_tensors(self.optimizer) if self.optimizer is not None else None
            migrate(runtime, plan.migration, carried, max_bytes=self.setting.migration_bytes)
        step = begin_step(runtime, plan, ahead.counts, group_of_micro_batch, ahead.experts_TLK, ahead.lengths)
        runtime.arm(step.armed)
        return step

    def _plan(self, counts: StepCounts, previous: Placement) -> tuple[StepPlan, NDArray[np.int64], float, float]:
        """The plan, the group that runs each micro-batch, and when planning began and ended."""
        start = perf_counter()
        setting, group = self.setting, self.runtime.group
        own = own_schedule(
            counts.sequences.length_of_sequence, counts.rank_of_sequence, num_ranks=group.num_ranks,
            tokens_per_rank=setting.tokens_per_rank,
        )  # fmt: skip
        planner = planner_named(setting.planner) if isinstance(setting.planner, str) else setting.planner
        off = planner.name == STATIC
        layers, experts = counts.sequences.num_layers, counts.sequences.num_experts
        plain = contiguous(group.cluster, num_layers=layers, num_experts=experts)
        problem = StepProblem(
            cluster=group.cluster, sequences=counts.sequences, schedule=own.schedule,
            tokens_per_rank=setting.tokens_per_rank if setting.move_sequences else None,
            least_micro_batches=group.num_groups, previous=plain if off else previous,
            spare_slots=self.runtime.setting.spare_slots, standing_slots=setting.standing_slots,
            max_moves_per_layer=setting.max_moves_per_layer, rates=self._rates, seed=setting.seed,
        )  # fmt: skip
        plan = planner.plan(problem)
        if off:
            plan = replace(plan, previous=previous)  # homes that have moved go back
        if plan.schedule is None or plan.schedule is own.schedule or _same(plan.schedule, own.schedule):
            of_micro_batch = own.group_of_micro_batch
        else:
            of_micro_batch = np.arange(plan.num_micro_batches) % group.num_groups
        return replace(plan, schedule=plan.schedule or own.schedule), of_micro_batch, start, perf_counter()

    # --- gradients and weights ---

    def finish_gradients(self, module: nn.Module | None = None) -> None:
        """Collective, once before clipping and the optimizer: gradients of copies home, sums over data-parallel groups.

        With a module, gradients of its dense parameters are summed over all ranks too. A rank's loss is its share of
        the whole loss: sums, not means.
        """
        self.runtime.finish_gradients()
        if module is not None:
            sum_dense_gradients(dense_parameters(module, self.runtime), self.runtime.group)

    def weights_changed(self) -> None:
        """Collective, after anything but an attached optimizer changed weights: copies are fetched anew."""
        self.runtime.weights_changed()

    def _before_optimizer(self, *_arguments: Any) -> None:  # noqa: ANN401
        self._optimizer_began = perf_counter()
        if self.runtime.gradients_under_way:
            raise ExecuteError(
                "gradients of copies have not returned: call balancer.finish_gradients() before the optimizer"
            )

    def _after_optimizer(self, *_arguments: Any) -> None:  # noqa: ANN401
        self.runtime.recorder.add(
            Kind.OPTIMIZER, Resource.COMPUTE, Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=-1),
            Direction.BACKWARD, self._optimizer_began, perf_counter(),
        )  # fmt: skip
        self.runtime.weights_changed()

    def close(self) -> None:
        """Stop background work."""
        self._planning.shutdown(wait=True, cancel_futures=True)
        self.runtime.close()


def _ignore(_value: object) -> None:
    """Only whether it could be computed matters."""


def _same(one: Schedule, other: Schedule) -> bool:
    return np.array_equal(one.micro_batch_of_sequence, other.micro_batch_of_sequence) and np.array_equal(
        one.rank_of_sequence, other.rank_of_sequence
    )


def _model_of(runtime: Runtime) -> MoEModel:
    """The layers' shapes, for prices."""
    spec, like = runtime.spec, runtime.weights[0]
    return MoEModel(
        name="runtime", num_layers=len(runtime.weights), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=like.dtype.itemsize,
        gradient_bytes=like.gradient_dtype.itemsize,
    )  # fmt: skip
