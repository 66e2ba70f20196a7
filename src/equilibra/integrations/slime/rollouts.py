"""When slime's passes over a rollout are planned, and from which routing.

slime keeps the routing of a whole rollout per layer, one entry for each micro-batch of this rank:

    router.routing_replay.top_indices_list   [M] ids [T, K]: optimizer step 0's micro-batches, then step 1's, ...
    router.routing_replay.forward_index      entries that forward passes have consumed

Hooks do not learn how many micro-batches their optimizer step has, so the whole rollout is planned at once. Every
optimizer step arms the rest of the plan, since copies must hold the weights after the previous step, and checks the
plan's position against `forward_index`. The log-prob stage covers the same micro-batches and shares the plan.

Homes do not move: slime switches between actor, reference and teacher by copying weights into a rank's parameters, and
numbers experts by rank when it sends weights to the rollout engines. Both need experts where Megatron puts them.
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
"""slime's replay stage in which routers take recorded experts"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRollout:
    """The plan of a rollout."""

    step: Step
    """all optimizer steps of the rollout as one"""
    seconds: float
    """time to count, gather and plan, in seconds"""


class Rollouts:
    """Plans the rollouts of an actor's model. Collective: all its processes call at the same passes."""

    def __init__(self, model: Sequence[nn.Module], setting: MegatronSetting) -> None:
        parts = [part for chunk in model for part in chunk.modules()]
        if any(getattr(getattr(part, "config", None), "moe_router_fusion", False) for part in parts):
            raise InputError(
                "cannot replay routing with --moe-router-fusion: the fused router ignores slime's replay; remove it"
            )
        self.balancer = balance(model, setting)
        layers = [part for chunk in model for part in chunk.modules() if getattr(part, "visits", None) is not None]
        self.replays = [_replay_of(layer) for layer in layers]
        """of the MoE layers, in their order; none on a pipeline stage that has no such layers"""
        self._waiting: PlannedRollout | None = None
        """planned in the log-prob stage; its update has not begun"""
        self._rollout: PlannedRollout | None = None
        """the rollout of the current update"""
        self._start = 0
        """its micro-batches before this optimizer step"""

    def before_log_probs(self, stage: str) -> None:
        """Before a forward-only pass: plan it if it replays, else run it on homes."""
        self._rollout = None
        self.balancer.end()
        if stage == REPLAYED:
            self._waiting = self._begin(Stage.LOGPROB)

    def before_train_step(self, step_id: int) -> PlannedRollout | None:
        """Before an optimizer step; returns the rollout's plan at the first one."""
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
        """Micro-batches that slime has replayed; an error if the plan is at another."""
        taken = self._taken()
        if step_id == 0:
            if taken:
                raise ExecuteError(f"a rollout must be replayed from its first micro-batch, not from {taken}")
            return taken
        done = self._done()
        planned = self._start + done if self._rollout else 0
        if self._rollout is None or taken != planned:
            raise ExecuteError(
                f"optimizer step {step_id} replays from micro-batch {taken} on, but the plan is at {planned}: set both "
                "hooks, and run no pass between them that they do not see"
            )
        return taken

    def _first_step(self) -> PlannedRollout:
        waiting, self._waiting, self._start = self._waiting, None, 0
        current = np.array([waiting is not None and self._is_current(waiting)])
        every = self.balancer.group.gather(current, what="checking that the rollout is the one that was planned")
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
                f"routers have recorded {min(counts)} to {max(counts)} micro-batches, but all need the same number: "
                "some router's list was filled twice, or not at all"
            )
        if counts == {0}:
            raise InputError(
                "no routing is recorded: without --use-rollout-routing-replay slime records it in the log-prob stage, "
                "which --use-rollout-logprobs skips; change one of the flags"
            )
        odd = next((entry for of_layer in lists for entry in of_layer if not torch.is_tensor(entry)), None)
        if odd is not None:
            raise InputError(
                f"recorded routing must be tensors, not {type(odd).__name__}: keep it in memory, without the hook that "
                "spills it to --rollout-routed-experts-store-dir"
            )
        return by_micro_batch(lists)

    def _begin(self, stage: Stage) -> PlannedRollout:
        start, routing = perf_counter(), list[list[list[Tensor]]]()
        self.balancer.group.all_succeed(lambda: routing.append(self.routing()), what="reading the routing of a rollout")
        step = self.balancer.begin(routing[0], stage)
        return PlannedRollout(step=step, seconds=perf_counter() - start)

    def _is_current(self, planned: PlannedRollout) -> bool:
        """Whether the plan has the rollout's number of micro-batches. A wrong match costs balance, not correctness."""
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
                f"routers have replayed {min(taken)} to {max(taken)} micro-batches, but all need the same number: a "
                "pass was interrupted"
            )
        return int(taken.pop()) if taken else 0


def _replay_of(layer: Any) -> Any:  # noqa: ANN401 - Megatron's MoE layer
    replay = getattr(layer.router, "routing_replay", None)
    if replay is None:
        raise InputError(
            "a router has no routing_replay: slime adds it to models built with --use-routing-replay or "
            "--use-rollout-routing-replay; check the flags, and that slime's Megatron patch or bridge is installed"
        )
    return replay
