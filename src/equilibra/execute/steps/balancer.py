"""Balancer: the object a training loop holds. Routing of a step goes in, micro-batches to run come out.

    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=8192), optimizer=optimizer)
    step = balancer.begin(routing)                      # collective: counts, plan, moved homes, copies
    data = step.send(own_data)                          # sequences' data to the ranks that run them
    for micro_batch in step.micro_batches(Stage.UPDATE):
        with micro_batch:
            loss_of(micro_batch).backward()
    balancer.finish_gradients(model)                    # then clip, optimizer.step()

Every rank makes the same plan from the same counts; ranks compare its hash before they use it. A failure on one rank is
an error on all within the group's timeout. `planner="static"` switches balancing off: contiguous homes, no copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.model import MoEModel
from equilibra.core.placement import Migration, Placement
from equilibra.core.visit import VisitKey, signed_ids
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.group import device_name
from equilibra.execute.record import Moment
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.migrate import migrate, optimizer_tensors
from equilibra.execute.steps.gradients import (
    check_experts_are_whole,
    check_replicated,
    dense_parameters,
    is_sharded,
    sharded_and_summed,
    sum_dense_gradients,
)
from equilibra.execute.steps.masters import Attached
from equilibra.execute.steps.planning import (
    BalancerSetting,
    PlannedStep,
    StepCounts,
    check_routing,
    gather_counts,
    plan_of_counts,
    recorded_experts,
)
from equilibra.execute.steps.step import Step, begin_step
from equilibra.trace.routing import RoutingTrace

__all__ = ["Balancer", "BalancerSetting"]

COMPARE_EVERY = 100
"""sums of dense gradients between two comparisons of dense weights over ranks"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ahead:
    """A prepared step: counts gathered, plan being made in the background."""

    experts_TLK: NDArray[np.signedinteger]
    counts: StepCounts
    plan: Future[PlannedStep]


class Balancer:
    """Plans steps, moves homes and arms the runtime. A model has one on every rank."""

    def __init__(
        self, runtime: Runtime, setting: BalancerSetting, *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        """Attach to the optimizers that hold the experts; without one, homes do not move.

        masters: float32 copy of each low-precision parameter, held by one of the optimizers (see `masters`).
        """
        self.runtime, self.setting, self.masters = runtime, setting, dict(masters or {})
        self.optimizers = _as_list(optimizer)
        self._attached = Attached(self.optimizers, self.masters, runtime)
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="equilibra-plan")
        self._ahead: _Ahead | None = None
        self._optimizer_began: Moment = 0.0
        self._sums = 0
        """sums of dense gradients since weights were last changed by hand"""
        self._closed = False
        num_nodes = runtime.group.cluster.num_nodes
        self._rates = setting.on(device_name(runtime.gpu)).rates_of(_model_of(runtime), num_nodes=num_nodes)
        self._hooks = [one.register_step_pre_hook(self._before_optimizer) for one in self.optimizers]
        self._hooks += [one.register_step_post_hook(self._after_optimizer) for one in self.optimizers]

    # --- plans ---

    def prepare(self, routing: RoutingTrace | None, mini_batches: NDArray[np.integer] | None = None) -> None:
        """Collective: gather the next step's counts, and plan it in the background while this one runs.

        routing: recorded routing of this rank's sequences; None: no sequences. mini_batches: optimizer step of each
        sequence, from 0 without gaps over all ranks; None: all 0.
        """
        if self._ahead is not None or self._closed:
            raise InputError(
                "this balancer is closed" if self._closed else "a step is prepared already: begin() it first"
            )
        runtime, spec = self.runtime, self.runtime.spec
        layers = len(runtime.weights)
        mini = np.zeros(0 if routing is None else routing.length_of_sequence.size, np.int64)
        if mini_batches is not None and (mini.size or np.size(mini_batches)):  # numpy makes [] floats
            mini = np.asarray(mini_batches)
        runtime.group.all_succeed(
            lambda: check_routing(routing, mini, num_layers=layers, num_experts=spec.num_experts, top_k=spec.top_k),
            what="comparing routing with the model",
        )
        experts = np.zeros((0, layers, spec.top_k), signed_ids(spec.num_experts))
        if routing is not None:
            experts = recorded_experts(routing)
        counts = gather_counts(runtime.group, routing, experts, mini, num_layers=layers, num_experts=spec.num_experts)
        plan = self._planning.submit(self._plan, counts, runtime.placement)
        self._ahead = _Ahead(experts_TLK=experts, counts=counts, plan=plan)

    def begin(self, routing: RoutingTrace | None = None, mini_batches: NDArray[np.integer] | None = None) -> Step:
        """Collective: plan (or take the prepared plan), move homes, arm the runtime; returns the step to run.

        Takes the arguments of `prepare`. Without routing it begins the prepared step, or one without sequences here.
        """
        self.runtime.check_whole()
        check_experts_are_whole(self.runtime)
        if self._ahead is None:
            self.prepare(routing, mini_batches)
        elif routing is not None or mini_batches is not None:
            raise InputError("a step is prepared already: begin() it without routing and mini-batches")
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        runtime, group = self.runtime, self.runtime.group
        asked = perf_counter()
        planned = group.all_succeed(lambda: self._finished(ahead.plan), what="planning the step")
        waited = perf_counter() - asked
        plan = planned.plan
        group.agree(f"plan {plan.digest}, version {runtime.version}", what="the plan and the weights of the step")
        runtime.disarm()
        group.barrier(what="beginning the step")
        runtime.recorder.begin_step(runtime.gpu)
        runtime.recorder.add(
            Kind.PLAN, Resource.CPU, VisitKey.once(), Direction.FORWARD, runtime.recorder.began,
            runtime.recorder.began + min(waited, planned.ended - planned.began),
        )  # fmt: skip
        if plan.migration.num_moves:
            self._move(plan.migration)
        step = begin_step(runtime, planned, ahead.counts, ahead.experts_TLK)
        runtime.arm(step.armed)
        return step

    def _finished(self, plan: Future[PlannedStep]) -> PlannedStep:
        try:
            return plan.result(self.runtime.group.timeout_s)
        except TimeoutError:
            message = f"the planner took more than the timeout of {self.runtime.group.timeout_s} s"
            raise ExecuteError(message) from None

    def move_homes(self, placement: Placement) -> None:
        """Collective, between steps: move homes with their optimizer state, for example to resume a run's placement."""
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
        setting, slots = self.setting, self.runtime.setting.spare_slots
        moves = setting.max_moves_per_layer if self.optimizers else 0
        bound = replace(setting, spare_slots=min(setting.spare_slots, slots), max_moves_per_layer=moves)
        return plan_of_counts(counts, previous, self.runtime.group, bound, self._rates)

    # --- gradients and weights ---

    def finish_gradients(
        self, module: nn.Module | None = None, *, scaler: torch.amp.GradScaler | None = None
    ) -> None:  # fmt: skip
        """Collective, once before clipping and the optimizer: return gradients of copies and sum over ranks.

        With a module, dense gradients are summed over all ranks too, except those that FSDP2 shards and has summed.
        They are sums, not means: a rank's loss is its share of the whole loss. Gradients move to masters if there are
        any. With a scaler they are unscaled, and ranks agree on infinities. Several backward passes may come before;
        after it, every optimizer must step or drop its gradients (`zero_grad`, `discard_gradients`).
        """
        if self._attached.summed:
            raise ExecuteError(
                "gradients are summed over ranks already, and would be summed twice: call finish_gradients() once "
                "before optimizer.step() of all optimizers, or discard_gradients()"
            )
        check_experts_are_whole(self.runtime)
        if module is not None:
            if self._sums % COMPARE_EVERY == 0:
                check_replicated(module, self.runtime)
            self._sums += 1
        self.runtime.finish_gradients()
        if module is not None:
            dense = dense_parameters(module, self.runtime)
            if sharded_and_summed(module):  # FSDP has summed those
                dense = [parameter for parameter in dense if not is_sharded(parameter)]
            sum_dense_gradients(dense, self.runtime.group)
        self._attached.gradients_are_summed(dense=module is not None or scaler is not None)
        if scaler is not None:
            self._attached.unscale(scaler)

    def discard_gradients(self, module: nn.Module) -> None:
        """Drop all gradients, including those of copies, which `zero_grad` does not reach."""
        self.runtime.discard_gradients()
        module.zero_grad(set_to_none=True)
        self._attached.discard()

    def weights_changed(self) -> None:
        """Collective, after anything but an attached optimizer changed weights: drop and refetch copies."""
        self.runtime.weights_changed()
        self._attached.forget()
        self._sums = 0

    def release(self) -> None:
        """Collective, between steps, before weights are offloaded: CUDA keeps memory that another rank has open."""
        self.runtime.release()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:  # noqa: ANN401
        self._optimizer_began = self.runtime.recorder.now()
        self.runtime.check_whole()
        if self.runtime.gradients_under_way:
            raise ExecuteError(
                "gradients of copies have not returned: call balancer.finish_gradients() before the optimizer"
            )
        self._attached.before_step(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:  # noqa: ANN401
        self.runtime.recorder.add(
            Kind.OPTIMIZER, Resource.COMPUTE, VisitKey.once(), Direction.BACKWARD, self._optimizer_began,
            self.runtime.recorder.now(),
        )  # fmt: skip
        self._attached.after_step(optimizer)
        if self._attached.holds_experts(optimizer):
            self.runtime.weights_changed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Close; on an error, first tell the other ranks so that nobody waits for this one."""
        if error is not None:
            self.runtime.group.watch.fail(error)
        self.close()

    def close(self) -> None:
        """Stop background work and detach from the optimizers."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._planning.shutdown(wait=True, cancel_futures=True)
        self.runtime.close()


def _as_list(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _model_of(runtime: Runtime) -> MoEModel:
    spec, like = runtime.spec, runtime.weights[0]
    return MoEModel(
        name="runtime", num_layers=len(runtime.weights), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=like.dtype.itemsize,
        gradient_bytes=like.gradient_dtype.itemsize,
    )  # fmt: skip
