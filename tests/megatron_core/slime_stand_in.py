"""A stand-in for slime, which is not on PyPI: its replay, and the order in which its actor trains on a rollout.

Written afresh from what slime of 2026-08 does, with its names where hooks see them:

- a router has `routing_replay`; `ROUTING_REPLAY_STAGE` says what routers do: fallthrough, record, replay_forward,
  replay_backward;
- a rollout's passes: reference (fallthrough), actor's old log-probabilities (replay_forward or record), then one
  optimizer step after another (forward: replay_forward, backward: replay_backward), over the same micro-batches;
- weights of the reference are copied into the parameters of the actor, and back.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from tests.megatron_core import models
from tests.megatron_core.gpt_runs import Training, inputs
from torch import Tensor

STAGE = "ROUTING_REPLAY_STAGE"


class RoutingReplay:
    """One router's routes of a rollout, an entry for every micro-batch."""

    all_routing_replays: ClassVar[list[RoutingReplay]] = []

    def __init__(self) -> None:
        self.forward_index = self.backward_index = 0
        self.top_indices_list: list[Tensor] = []
        RoutingReplay.all_routing_replays.append(self)

    def record(self, ids: Tensor) -> None:
        self.top_indices_list.append(ids.to("cpu", torch.int32).clone())

    def pop_forward(self) -> Tensor:
        self.forward_index += 1
        return self.top_indices_list[self.forward_index - 1]

    def pop_backward(self) -> Tensor:
        self.backward_index += 1
        return self.top_indices_list[self.backward_index - 1]

    def get_replay_topk(self, scores, topk, num_groups, group_topk, compute_topk):
        """What Megatron's router asks instead of choosing for itself."""
        stage = os.environ[STAGE]
        if stage in {"fallthrough", "record"}:
            weights, ids = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if stage == "record":
                self.record(ids)
            return weights, ids
        ids = (self.pop_forward() if stage == "replay_forward" else self.pop_backward()).long()
        assert ids.shape == (len(scores), topk)
        return scores.gather(1, ids), ids


class Actor:
    """slime's actor with one chunk of a model."""

    def __init__(
        self, training: Training, args: Namespace, num_microbatches: list[int], *, replays: bool = True
    ) -> None:
        self.training, self.args, self.num_microbatches = training, args, num_microbatches
        self.model, self.optimizer = [training.model], training.optimizer
        self.model[0].role = "actor"
        RoutingReplay.all_routing_replays.clear()
        for layer in training.layers if replays else ():
            layer.router.routing_replay = layer.router.router_replay = RoutingReplay()
        self.reference = self.backup()
        self.train_hook: Callable[..., None] | None = None
        self.log_prob_hook: Callable[..., None] | None = None
        self.said: dict[str, list[float]] = {"reference": [], "old": [], "update": []}

    def backup(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model[0].parameters()]

    @contextmanager
    def weights(self, other: list[Tensor]) -> Iterator[None]:
        """Another model's weights in the same parameters."""
        own = self.backup()
        for values in (other, own):
            for parameter, value in zip(self.model[0].parameters(), values, strict=True):
                parameter.data.copy_(value)
            if values is other:
                yield

    def train_actor(self, rollout_id: int, routes: list[list[Tensor]] | None, *, log_probs: bool = True) -> None:
        """One rollout. routes: [M][L] of the rollout engine; None: those of the pass for old log-probabilities."""
        replays = RoutingReplay.all_routing_replays
        for layers in routes or []:
            for replay, ids in zip(replays, layers, strict=True):
                replay.record(ids)
        with self.weights(self.reference):
            self.said["reference"] += self.forward_only(rollout_id, "fallthrough", "ref_")
        if log_probs:
            self.said["old"] += self.forward_only(rollout_id, "replay_forward" if routes else "record", "")
            for replay in replays:
                replay.forward_index = 0
        os.environ[STAGE] = "replay_backward"
        first = 0
        for step_id, num in enumerate(self.num_microbatches):
            self.said["update"].append(self.train_one_step(rollout_id, step_id, first, num))
            first += num
        for replay in replays:
            replay.forward_index = replay.backward_index = 0
            replay.top_indices_list = []

    @torch.no_grad()
    def forward_only(self, rollout_id: int, stage: str, store_prefix: str) -> list[float]:
        os.environ[STAGE] = stage
        if self.log_prob_hook is not None:
            self.log_prob_hook(self.args, self.model, store_prefix)
        numbers = iter(range(sum(self.num_microbatches)))
        found = []
        for num in self.num_microbatches:
            found += self.passes(lambda _data, model: (model(*inputs(rollout_id, next(numbers))), _loss), num)
        return [float(one["loss"]) for one in found]

    def train_one_step(self, rollout_id: int, step_id: int, first: int, num: int) -> float:
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.train_hook is not None:
            self.train_hook(self.args, rollout_id, step_id, self.model, self.optimizer, None)
        numbers = iter(range(first, first + num))

        def forward_step(_data: Any, model: Any) -> Any:
            before, os.environ[STAGE] = os.environ[STAGE], "replay_forward"
            out = model(*inputs(rollout_id, next(numbers)))
            os.environ[STAGE] = before
            return out, _loss

        losses = self.passes(forward_step, num, backward=True)
        self.optimizer.step()
        return float(sum(one["loss"] for one in losses))

    def passes(self, forward_step: Callable[..., Any], num: int, *, backward: bool = False) -> list[dict[str, Tensor]]:
        """By Megatron's own schedules; only the last pipeline stage has losses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(()), model=self.model, num_microbatches=num,
            seq_length=models.SEQUENCE, micro_batch_size=1, forward_only=not backward,
        )  # fmt: skip


def _loss(tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return tensor.mean(), {"loss": tensor.detach().mean()}
