"""A stand-in for NeMo-RL, which is not on PyPI: how its policy worker runs a pass, and its replay over Megatron's.

Written afresh from what NeMo-RL of 2026-08 does, with its names where the adapter sees them (held to its sources by
tests/contracts/upstream/nemo_rl.toml):

- a pass is `megatron_forward_backward`, over micro-batches with `routed_experts_cp_sharded` [1, T, L, K];
- before each forward the routers get their routing, afterwards they replay backward (training) or are cleared;
- a row of -1 has no route: the router chooses for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.megatron_core import models
from tests.megatron_core.gpt_runs import MICRO_BATCHES, Training, inputs
from torch import Tensor


@dataclass
class ProcessedMicrobatch:
    number: int
    step: int
    routed_experts_cp_sharded: Tensor | None


class RoutelessReplay:
    """Megatron's RouterReplay, with NeMo-RL's fallback for rows without a route."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._plain = own.get_replay_topk

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        own, forward = self._own, self._own.router_replay_action == RouterReplayAction.REPLAY_FORWARD
        if own.router_replay_action is None:
            return self._plain(scores, topk, num_groups, group_topk, default_compute_topk)
        ids = own.target_topk_idx if forward else own.replay_backward_list.pop(0)
        missing = (ids == -1).all(dim=-1)
        if bool(missing.any()):
            _, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            ids = torch.where(missing[:, None], chosen, ids)
            if forward:
                own.replay_backward_list[-1] = ids.detach()
        return scores.gather(1, ids), ids


def routers_of(model: Any) -> list[Any]:
    return [one.router_replay for one in model.modules() if getattr(one, "router_replay", None) is not None]


def build_router_replay_assignments(model: Any, routed_experts: Tensor) -> list[tuple[Any, Tensor]]:
    local = routed_experts.squeeze(0)
    return [(replay, local[:, number].to(torch.long).contiguous()) for number, replay in enumerate(routers_of(model))]


def megatron_forward_backward(
    model: Any, data_iterator: Iterator[ProcessedMicrobatch], num_microbatches: int, seq_length: int, mbs: int,
    post_processing_fn: Callable[..., Any], forward_only: bool = False, use_router_replay: bool = False,
    router_replay_train: bool = False,
) -> Any:  # fmt: skip
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def act(action: Any) -> None:
        for replay in routers_of(model):
            replay.set_router_replay_action(action)

    def clear() -> None:
        for replay in routers_of(model):
            replay.clear_router_replay_action()
            replay.clear_indices()

    def forward_step(iterator: Iterator[ProcessedMicrobatch], chunk: Any) -> Any:
        batch = next(iterator)
        if use_router_replay:
            for replay, ids in build_router_replay_assignments(model, batch.routed_experts_cp_sharded):
                replay.set_target_indices(ids)
            act(RouterReplayAction.REPLAY_FORWARD)
        out = chunk(*inputs(batch.step, batch.number))
        if use_router_replay and router_replay_train:
            act(RouterReplayAction.REPLAY_BACKWARD)
        elif use_router_replay:
            clear()
        return out, post_processing_fn

    if use_router_replay:
        clear()
    try:
        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data_iterator, model=[model],
            num_microbatches=num_microbatches, seq_length=seq_length, micro_batch_size=mbs, forward_only=forward_only,
        )  # fmt: skip
    finally:
        if use_router_replay:
            clear()


class Worker:
    """A policy worker: reference and old log-probabilities, then an optimizer step, for each of several batches."""

    def __init__(self, training: Training, run: Callable[..., Any], unrouted: float) -> None:
        self.training, self.run, self.unrouted = training, run, unrouted
        for layer in training.layers:
            own = layer.router.router_replay
            own.get_replay_topk = RoutelessReplay(own).get_replay_topk
        self.said: list[float] = []

    def _batches(self, step: int) -> Iterator[ProcessedMicrobatch]:
        for number, layers in enumerate(self.training.routing(step)):
            routed = torch.stack(layers, dim=1).to(torch.int16)
            rng = torch.Generator().manual_seed(step * 100 + number)
            routed[torch.rand(len(routed), generator=rng) < self.unrouted] = -1
            yield ProcessedMicrobatch(number, step, routed[None])

    def _pass(self, step: int, *, train: bool, replay: bool = True) -> None:
        losses = self.run(
            model=self.training.model, data_iterator=self._batches(step), num_microbatches=MICRO_BATCHES,
            seq_length=models.SEQUENCE, mbs=1, post_processing_fn=lambda x: (x.mean(), {"loss": x.detach().mean()}),
            forward_only=not train, use_router_replay=replay, router_replay_train=train,
        )  # fmt: skip
        self.said += [float(one["loss"]) for one in losses]

    def train(self, step: int) -> None:
        self._pass(step, train=False, replay=False)
        self._pass(step, train=False)
        self.training.model.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        self._pass(step, train=True)
        self.training.optimizer.step()
