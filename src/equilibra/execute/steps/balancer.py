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
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
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
from equilibra.execute.steps.counts import StepCounts, check_routing, gather_counts, recorded_experts
from equilibra.execute.steps.gradients import (
    check_experts_are_whole,
    check_replicated,
    dense_parameters,
    is_sharded,
    sharded_and_summed,
    sum_dense_gradients,
)
from equilibra.execute.steps.masters import Attached
from equilibra.execute.steps.planning import BalancerSetting, PlannedStep, plan_of_counts
from equilibra.execute.steps.step import Step, begin_step
from equilibra.trace.routing import RoutingTrace

__all__ = ["Balancer", "BalancerSetting"]

COMPARE_EVERY = 100
"""sums of dense gradients between two comparisons of dense weights over ranks, each of which reads them once"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ahead:
    """A step whose counts are gathered and whose plan is made in the background."""

    experts_TLK: NDArray[np.signedinteger]
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

        masters: for each parameter of low precision its float32 copy, which one of the optimizers holds (see
        `masters`).
        """
        self.runtime, self.setting, self.masters = runtime, setting, dict(masters or {})
        self.optimizers = _as_list(optimizer)
        self._attached = Attached(self.optimizers, self.masters, runtime)
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="equilibra-plan")
        self._ahead: _Ahead | None = None
        self._optimizer_began: Moment = 0.0
        self._sums = 0
        """of dense gradients since weights were last changed by hand"""
        self._closed = False
        num_nodes = runtime.group.cluster.num_nodes
        self._rates = setting.on(device_name(runtime.gpu)).rates_of(_model_of(runtime), num_nodes=num_nodes)
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
        experts = np.zeros((0, layers, spec.top_k), signed_ids(spec.num_experts))
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
        check_experts_are_whole(self.runtime)
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
        runtime.recorder.begin_step(runtime.gpu)
        runtime.recorder.add(
            Kind.PLAN, Resource.CPU, VisitKey.once(), Direction.FORWARD, runtime.recorder.began,
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
        setting, slots = self.setting, self.runtime.setting.spare_slots
        moves = setting.max_moves_per_layer if self.optimizers else 0
        bound = replace(setting, spare_slots=min(setting.spare_slots, slots), max_moves_per_layer=moves)
        return plan_of_counts(counts, previous, self.runtime.group, bound, self._rates)

    # --- gradients and weights ---

    def finish_gradients(
        self, module: nn.Module | None = None, *, scaler: torch.amp.GradScaler | None = None
    ) -> None:  # fmt: skip
        """Collective, once before clipping and the optimizer: gradients of copies home, sums over data-parallel groups.

        With a module, gradients of its dense parameters are summed over all ranks too, but for those that FSDP2 shards
        and has summed. A rank's loss is its share of the whole loss: sums, not means. Gradients of parameters with
        masters are from then on those of the masters. With a scaler they are divided by its scale, and ranks agree on
        whether there are infinities. Backward passes of several steps may come before it; once it was called every
        optimizer must step, or its gradients be thrown away (`zero_grad`, `discard_gradients`).
        """
        if self._attached.summed:
            raise ExecuteError(
                "gradients are summed over ranks already, and would be summed twice: call finish_gradients() once "
                "before optimizer.step() of all optimizers, or discard_gradients()"
            )
        check_experts_are_whole(self.runtime)
        if module is not None:
            self._compare_replicas(module)
        self.runtime.finish_gradients()
        if module is not None:
            dense = dense_parameters(module, self.runtime)
            if sharded_and_summed(module):  # FSDP has summed those
                dense = [parameter for parameter in dense if not is_sharded(parameter)]
            sum_dense_gradients(dense, self.runtime.group)
        self._attached.gradients_are_summed(dense=module is not None or scaler is not None)
        if scaler is not None:
            self._attached.unscale(scaler)

    def _compare_replicas(self, module: nn.Module) -> None:
        """Collective: before the first sum, and now and then, dense weights must be the same on all ranks."""
        if self._sums % COMPARE_EVERY == 0:
            check_replicated(module, self.runtime)
        self._sums += 1

    def discard_gradients(self, module: nn.Module) -> None:
        """Throw all gradients away, also those that copies hold: `zero_grad` does not know of them."""
        self.runtime.discard_gradients()
        module.zero_grad(set_to_none=True)
        self._attached.discard()

    def weights_changed(self) -> None:
        """Collective, after anything but an attached optimizer changed weights: copies are fetched anew."""
        self.runtime.weights_changed()
        self._attached.forget()
        self._sums = 0

    def release(self) -> None:
        """Collective, between steps: give back the memory of copies, and let go of other ranks' weights.

        Call it before weights leave the device (offload): memory that another rank has open is not freed.
        """
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

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Close; on an error the other ranks are told of it first, so that nobody waits for this one."""
        if error is not None:
            self.runtime.group.watch.fail(error)
        self.close()

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


def _model_of(runtime: Runtime) -> MoEModel:
    """The layers' shapes, for prices."""
    spec, like = runtime.spec, runtime.weights[0]
    return MoEModel(
        name="runtime", num_layers=len(runtime.weights), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=like.dtype.itemsize,
        gradient_bytes=like.gradient_dtype.itemsize,
    )  # fmt: skip
