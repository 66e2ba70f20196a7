"""The interleaved schedule: two chunks of the model on every pipeline stage, each with micro-batches in flight."""

from __future__ import annotations

from typing import Any

import torch
from tests.megatron_core import models
from tests.megatron_core.gpt_runs import arriving, inputs

from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, balance, set_replay

MICRO_BATCHES = 4


class Chunks:
    """A model in two chunks of a layer each per stage, and its optimizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        from megatron.core import parallel_state as groups
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config = models.config(
            4, finalize_model_grads_func=finalize_model_grads, virtual_pipeline_model_parallel_size=2, **options
        )
        self.stage = groups.get_pipeline_model_parallel_rank()
        wrap = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.chunks = []
        for chunk in range(2):
            first, last = (chunk, self.stage) == (0, 0), (chunk, self.stage) == (1, 1)
            model = models.gpt(self.config, seed=chunk, pre=first, post=last, vp_stage=chunk)
            self.chunks.append(DistributedDataParallel(self.config, wrap, model))
        setting = OptimizerConfig(
            optimizer="adam", lr=0.01, adam_eps=1e-5, use_distributed_optimizer=True, clip_grad=1.0
        )
        self.optimizer = get_megatron_optimizer(setting, self.chunks, use_gloo_process_groups=False)
        self.layers = [chunk.module.decoder.layers[0].mlp for chunk in self.chunks]
        self.balancer: Any = None

    def step(self, number: int) -> float:
        from megatron.core import parallel_state as groups
        from megatron.core.pipeline_parallel import get_forward_backward_func

        whole = models.routing(number, groups.get_data_parallel_rank(), MICRO_BATCHES, 4, models.SEQUENCE, models.SKEW)
        self.routing = [[layers[self.stage], layers[2 + self.stage]] for layers in whole]
        if self.balancer is not None:
            self.copies = self.balancer.begin(self.routing).plan.stages["update"].num_copies
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.begun = [0, 0]
        losses = get_forward_backward_func()(
            forward_step_func=lambda _data, model: self._forward(number, model),
            data_iterator=[iter(()), iter(())], model=self.chunks, num_microbatches=MICRO_BATCHES,
            seq_length=models.SEQUENCE, micro_batch_size=1,
        )  # fmt: skip
        self.optimizer.step()
        for layer in self.layers:
            layer.router.router_replay.clear_indices()
        return float(sum(one["loss"] for one in losses)) if losses else 0.0

    def _forward(self, number: int, model: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        chunk = self.chunks.index(model)
        replay, micro_batch = self.layers[chunk].router.router_replay, self.begun[chunk]
        self.begun[chunk] += 1
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        set_replay([replay], [self.routing[micro_batch][chunk]])
        out = model(*inputs(number, micro_batch))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return out, lambda tensor: (tensor.mean(), {"loss": tensor.detach().mean()})


def against_plain(options: dict[str, Any]) -> dict[str, Any]:
    """Losses of three steps and weights afterwards; homes stay, so slots are the same."""
    models.join(2, pipeline=2, virtual=2)
    plain, late, balanced = Chunks(options), Chunks(options), Chunks(options)
    late.balancer = balance(late.chunks, MegatronSetting(rates=Rates.free(), prefetch=False))
    balanced.balancer = balance(balanced.chunks, MegatronSetting(rates=Rates.free()))
    losses = [[one.step(number) for number in range(3)] for one in (plain, late, balanced)]
    layers = balanced.balancer.layers
    return {
        "losses": losses, "weights": _gap(plain, balanced), "weights of late": _gap(late, balanced),
        "copies": balanced.copies, "visits ahead": sum(one.num_ahead for one in layers),
        "left": arriving(balanced),
    }  # fmt: skip


@torch.no_grad()
def _gap(one: Chunks, other: Chunks) -> float:
    return max(
        float((a - b).abs().max())
        for mine, theirs in zip(one.chunks, other.chunks, strict=True)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )
