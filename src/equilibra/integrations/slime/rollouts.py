"""Rollouts: when slime's passes over a rollout are planned, and from which routes.

slime keeps the routes of a whole rollout, layer by layer, one entry for each micro-batch of this rank:

    router.routing_replay.top_indices_list   [M] ids [T, K]: optimizer step 0's micro-batches, then step 1's, ...
    router.routing_replay.forward_index      entries that forward passes have taken

No hook is told how many micro-batches its optimizer step has. So the rollout is planned at once. Every optimizer step
arms what is left of it, for copies must be of the weights after the step before, and compares where the plan stands
with `forward_index`. The pass for old log-probabilities goes over the same micro-batches, and shares the plan.

Homes stay: slime switches between actor, reference and teacher by copying weights into the parameters of a rank, and
numbers experts by rank when it gives weights to the rollout engines. Both need every expert where Megatron puts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.plan import Stage
from equilibra.integrations.megatron import MegatronSetting, Step, balance, by_micro_batch

__all__ = ["PlannedRollout", "Rollouts"]

REPLAYED = "replay_forward"
"""the stage of slime's replay in which routers take recorded experts"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRollout:
    """A rollout's plan."""

    step: Step
    """all optimizer steps of the rollout as one"""
    seconds: float
    """what counting, gathering and planning took"""


class Rollouts:
    """Plans the rollouts of one actor's model. On all its processes, at the same passes."""

    def __init__(self, model: Sequence[nn.Module], setting: MegatronSetting) -> None:
        parts = [part for chunk in model for part in chunk.modules()]
        if any(getattr(getattr(part, "config", None), "moe_router_fusion", False) for part in parts):
            raise InputError(
                "cannot replay routing with --moe-router-fusion: the fused router does not ask slime's replay for its "
                "experts; leave it out"
            )
        self.balancer = balance(model, setting)
        layers = [part for chunk in model for part in chunk.modules() if getattr(part, "visits", None) is not None]
        self.replays = [_replay_of(layer.router) for layer in layers]
        """of the MoE layers, in their order; none on a pipeline stage that has no such layers"""
        self._waiting: PlannedRollout | None = None
        """planned for old log-probabilities, not yet updated from"""
        self._rollout: PlannedRollout | None = None
        """updated from now"""
        self._start = 0
        """micro-batches of it before this optimizer step"""

    def before_log_probs(self, stage: str) -> None:
        """Before a pass without backward: of the actor with recorded experts, or of any other model without."""
        self._rollout = None
        self.balancer.end()
        if stage == REPLAYED:
            self._waiting = self._begin(Stage.LOGPROB)

    def before_train_step(self, step_id: int) -> PlannedRollout | None:
        """Before an optimizer step. Returns the rollout's plan with the first."""
        group, taken = self.balancer.group, list[int]()
        group.all_succeed(
            lambda: taken.append(self._position(step_id)), what="comparing slime's position with the plan"
        )
        if step_id == 0:
            return self._first_step()
        assert self._rollout is not None
        self._start = taken[0]
        self.balancer.arm(self._rollout.step, Stage.UPDATE, start=taken[0])
        return None

    def _position(self, step_id: int) -> int:
        """Where slime's replay stands; an error if the plan stands elsewhere."""
        taken = self._taken()
        if step_id == 0:
            if taken:
                raise ExecuteError(
                    f"a rollout must be replayed from its first micro-batch, not from micro-batch {taken}"
                )
            return taken
        planned = self._start + self._done() if self._rollout else 0
        if self._rollout is None or taken != planned:
            raise ExecuteError(
                f"optimizer step {step_id} replays from micro-batch {taken} on, the plan stands at {planned}: "
                "passes came between that no hook was told of, or one of the two hooks is not set"
            )
        return taken

    def _first_step(self) -> PlannedRollout:
        waiting, self._waiting, self._start = self._waiting, None, 0
        of_now = np.array([waiting is not None and self._is_of_now(waiting)])
        every = self.balancer.group.gather(of_now, what="asking whether the rollout is the one that was planned")
        if waiting is not None and all(bool(part[0]) for part in every):
            self._rollout = waiting
            self.balancer.arm(waiting.step, Stage.UPDATE)
        else:
            self._rollout = self._begin(Stage.UPDATE)
        return self._rollout

    def routing(self) -> list[list[Tensor]]:
        """[M][L] recorded ids [T, K] of the rollout."""
        if not self.replays:
            return []
        lists = [replay.top_indices_list for replay in self.replays]
        counts = {len(of_layer) for of_layer in lists}
        if len(counts) > 1:
            raise InputError(
                f"routers have recorded {min(counts)} to {max(counts)} micro-batches, all must have the same: the list "
                "of a router was filled twice, or not at all"
            )
        if counts == {0}:
            raise InputError(
                "no routes are recorded: without --use-rollout-routing-replay slime records them in the pass for old "
                "log-probabilities, which --use-rollout-logprobs leaves out"
            )
        odd = next((entry for of_layer in lists for entry in of_layer if not torch.is_tensor(entry)), None)
        if odd is not None:
            raise InputError(
                f"routes must be tensors when a rollout is planned, not {type(odd).__name__}: keep them in memory, "
                "without the hook that spills them to --rollout-routed-experts-store-dir"
            )
        return by_micro_batch(lists)

    def _begin(self, stage: Stage) -> PlannedRollout:
        start, routing = perf_counter(), list[list[list[Tensor]]]()
        self.balancer.group.all_succeed(lambda: routing.append(self.routing()), what="reading the routes of a rollout")
        step = self.balancer.begin(routing[0], stage)
        return PlannedRollout(step=step, seconds=perf_counter() - start)

    def _is_of_now(self, planned: PlannedRollout) -> bool:
        """Whether the rollout has as many micro-batches; if it is another nevertheless, only balance suffers."""
        num = planned.step.plan.num_micro_batches // self.balancer.group.num_groups
        return not self.replays or num == len(self.replays[0].top_indices_list)

    def _done(self) -> int:
        """Forward passes since the plan was armed."""
        return self.balancer.layers[0].num_done if self.balancer.layers else 0

    def _taken(self) -> int:
        """Micro-batches that forward passes have replayed."""
        taken = {replay.forward_index for replay in self.replays}
        if len(taken) > 1:
            raise ExecuteError(
                f"routers have replayed {min(taken)} to {max(taken)} micro-batches, all must have the same: a pass was "
                "cut off"
            )
        return int(taken.pop()) if taken else 0


def _replay_of(router: Any) -> Any:  # noqa: ANN401 - Megatron's router
    replay = getattr(router, "routing_replay", None)
    if replay is None:
        raise InputError(
            "a router has no routing_replay: slime gives them one when the model is built with --use-routing-replay or "
            "--use-rollout-routing-replay, and its patch of Megatron, or its bridge, is in place"
        )
    return replay
