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

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.model import MoEModel
from equilibra.core.placement import Migration, Placement
from equilibra.cost.rates import rates_for
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.migrate import migrate, optimizer_tensors
from equilibra.execute.steps.counts import StepCounts, check_routing, gather_counts, recorded_experts
from equilibra.execute.steps.gradients import dense_parameters, sum_dense_gradients
from equilibra.execute.steps.masters import LOW, hand_over_gradients, write_weights
from equilibra.execute.steps.planning import BalancerSetting, Limits, PlannedStep, plan_of_counts
from equilibra.execute.steps.record import Moment
from equilibra.execute.steps.step import Step, begin_step
from equilibra.execute.visits.visit import Where
from equilibra.measure.events import Direction, Kind, Resource, StageNumber
from equilibra.trace.routing import RoutingTrace

__all__ = ["Balancer", "BalancerSetting"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ahead:
    """A step whose counts are gathered and whose plan is made in the background."""

    experts_TLK: NDArray[np.int32]
    lengths: NDArray[np.int64]
    counts: StepCounts
    plan: Future[PlannedStep]


class Balancer:
    """Plans, moves and arms; one per model and rank."""

    def __init__(
        self, runtime: Runtime, setting: BalancerSetting, *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        """Attach to the optimizers that hold the experts; without one homes do not move.

        masters: for each parameter of few digits its float32 copy, which the optimizer holds (see `masters`).
        """
        self.runtime, self.setting, self.masters = runtime, setting, dict(masters or {})
        self.optimizers = _as_list(optimizer)
        _check_covered(runtime, self.optimizers, self.masters)
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="equilibra-plan")
        self._ahead: _Ahead | None = None
        self._optimizer_began: Moment = 0.0
        self._summed = False
        """whether gradients are summed over ranks and wait for the optimizer"""
        self._closed = False
        self._rates = setting.rates or rates_for(_model_of(runtime), num_nodes=runtime.group.cluster.num_nodes)
        self._hooks = [
            hook for one in self.optimizers
            for hook in (
                one.register_step_pre_hook(self._before_optimizer), one.register_step_post_hook(self._after_optimizer)
            )
        ]  # fmt: skip

    # --- plans ---

    def prepare(self, routing: RoutingTrace | None, mini_batches: NDArray[np.integer] | None = None) -> None:
        """Collective: gather the next step's counts, and plan it in the background while this one runs.

        routing: the recording of this rank's own sequences; None if it has none. mini_batches: for each of them the
        optimizer step it is for, from 0 on; None: all 0. Every number up to the largest has a sequence on some rank.
        """
        if self._ahead is not None or self._closed:
            reason = "this balancer is closed" if self._closed else "a step is prepared already: begin() it first"
            raise InputError(reason)
        runtime, spec = self.runtime, self.runtime.spec
        layers = len(runtime.weights)
        lengths = np.zeros(0, np.int64) if routing is None else routing.length_of_sequence
        mini = np.zeros(lengths.size, np.int64)
        if mini_batches is not None and (lengths.size or np.size(mini_batches)):  # [] has floats, says numpy
            mini = np.asarray(mini_batches)
        runtime.group.all_succeed(
            lambda: check_routing(routing, mini, num_layers=layers, num_experts=spec.num_experts, top_k=spec.top_k),
            what="comparing routing with the model",
        )
        experts = np.zeros((0, layers, spec.top_k), np.int32)
        if routing is not None:
            experts = recorded_experts(routing)
        counts = gather_counts(runtime.group, routing, experts, mini, num_layers=layers, num_experts=spec.num_experts)
        plan = self._planning.submit(self._plan, counts, runtime.placement)
        self._ahead = _Ahead(experts_TLK=experts, lengths=lengths, counts=counts, plan=plan)

    def begin(self, routing: RoutingTrace | None = None, mini_batches: NDArray[np.integer] | None = None) -> Step:
        """Collective: plan (or take the prepared plan), move homes, arm; returns the step to run.

        Arguments are those of `prepare`. Without routing the prepared step begins, or a step whose sequences are all on
        other ranks.
        """
        self.runtime.check_whole()
        if self._ahead is None:
            self.prepare(routing, mini_batches)
        elif routing is not None or mini_batches is not None:
            raise InputError("a step is prepared already: begin() it without routing and mini-batches")
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        runtime, group = self.runtime, self.runtime.group
        asked = perf_counter()
        group.all_succeed(lambda: self._wait_for(ahead.plan), what="planning the step")
        waited = perf_counter() - asked
        planned = ahead.plan.result()
        plan = planned.plan
        group.agree(f"plan {plan.digest}, version {runtime.version}", what="the plan and the weights of the step")
        runtime.disarm()
        group.barrier(what="beginning the step")
        runtime.recorder.begin_step(on_gpu=runtime.on_gpu)
        where = Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=-1)
        runtime.recorder.add(
            Kind.PLAN, Resource.CPU, where, Direction.FORWARD, runtime.recorder.began,
            runtime.recorder.began + min(waited, planned.ended - planned.began),
        )  # fmt: skip
        if plan.migration.num_moves:
            self._move(plan.migration)
        step = begin_step(runtime, planned, ahead.counts, ahead.experts_TLK, ahead.lengths)
        runtime.arm(step.armed)
        return step

    def _wait_for(self, plan: Future[Any]) -> None:
        try:
            plan.result(self.runtime.group.timeout_s)
        except TimeoutError:
            message = f"the planner took more than the timeout of {self.runtime.group.timeout_s} s"
            raise ExecuteError(message) from None

    def move_homes(self, placement: Placement) -> None:
        """Collective, between steps: move homes with their optimizer state, for example to where a run had them."""
        self.runtime.disarm()
        migration = Migration(before=self.runtime.placement, after=placement)
        if migration.num_moves:
            self._move(migration)

    def _move(self, migration: Migration) -> None:
        if not self.optimizers:
            raise InputError(
                "the plan moves homes, but no optimizer is attached whose moments would move along: pass it to "
                "Balancer, or use a planner that leaves homes where they are"
            )
        parts = [optimizer_tensors(one, self.masters) for one in self.optimizers]

        def carried(parameter: nn.Parameter) -> dict[str, Tensor]:
            return {name: tensor for tensors in parts for name, tensor in tensors(parameter).items()}

        migrate(self.runtime, migration, carried, max_bytes=self.setting.migration_bytes)

    def _plan(self, counts: StepCounts, previous: Placement) -> PlannedStep:
        slots = self.runtime.setting.spare_slots
        limits = Limits(rates=self._rates, spare_slots=slots, homes_move=bool(self.optimizers))
        return plan_of_counts(counts, previous, self.runtime.group, self.setting, limits)

    # --- gradients and weights ---

    def finish_gradients(self, module: nn.Module | None = None) -> None:
        """Collective, once before clipping and the optimizer: gradients of copies home, sums over data-parallel groups.

        With a module, gradients of its dense parameters are summed over all ranks too. A rank's loss is its share of
        the whole loss: sums, not means. Backward passes of several steps may come before it; once it was called the
        optimizer must step, or the gradients be discarded.
        """
        if self._summed:
            raise ExecuteError(
                "gradients are summed over ranks already, and would be summed twice: call finish_gradients() once "
                "before optimizer.step(), or discard_gradients()"
            )
        self.runtime.finish_gradients()
        self._summed = True
        if module is not None:
            sum_dense_gradients(dense_parameters(module, self.runtime), self.runtime.group)

    def discard_gradients(self, module: nn.Module) -> None:
        """Throw all gradients away, also those that copies hold: `zero_grad` does not know of them."""
        self.runtime.discard_gradients()
        module.zero_grad(set_to_none=True)
        self._summed = False

    def weights_changed(self) -> None:
        """Collective, after anything but an attached optimizer changed weights: copies are fetched anew."""
        self.runtime.weights_changed()
        self._summed = False

    def _before_optimizer(self, *_arguments: Any) -> None:  # noqa: ANN401
        self._optimizer_began = self.runtime.recorder.now()
        self.runtime.check_whole()
        if self.runtime.gradients_under_way:
            raise ExecuteError(
                "gradients of copies have not returned: call balancer.finish_gradients() before the optimizer"
            )

        hand_over_gradients(self.masters)

    def _after_optimizer(self, *_arguments: Any) -> None:  # noqa: ANN401
        self.runtime.recorder.add(
            Kind.OPTIMIZER, Resource.COMPUTE, Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=-1),
            Direction.BACKWARD, self._optimizer_began, self.runtime.recorder.now(),
        )  # fmt: skip
        write_weights(self.masters)
        self.weights_changed()

    def close(self) -> None:
        """Stop background work and let go of the optimizer."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._planning.shutdown(wait=True, cancel_futures=True)
        self.runtime.close()


def _as_list(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _check_covered(
    runtime: Runtime, optimizers: list[torch.optim.Optimizer], masters: dict[nn.Parameter, nn.Parameter]
) -> None:
    """The optimizers must hold every expert that learns, in enough digits: their state moves with homes."""
    held = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    for layer, weights in enumerate(runtime.weights if optimizers else []):
        for name in weights.names:
            part = weights.get_parameter(name)
            if not part.requires_grad:
                continue
            if id(masters.get(part, part)) not in held:
                raise InputError(
                    f"no attached optimizer holds {name} of MoE layer {layer}: pass all optimizers that train experts, "
                    "and masters where they work on copies"
                )
            if part not in masters and part.dtype in LOW:
                raise InputError(
                    f"{name} of MoE layer {layer} is {part.dtype} and its gradient float32: give the optimizer float32 "
                    "masters (equilibra.execute.steps.masters.float32_masters) and pass them to Balancer"
                )


def _model_of(runtime: Runtime) -> MoEModel:
    """The layers' shapes, for prices."""
    spec, like = runtime.spec, runtime.weights[0]
    return MoEModel(
        name="runtime", num_layers=len(runtime.weights), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=like.dtype.itemsize,
        gradient_bytes=like.gradient_dtype.itemsize,
    )  # fmt: skip
