"""One MoE layer of Megatron on several ranks: what it computes, as it is and balanced."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.megatron_core import models

TOKENS = 20


def hidden_of(rank: int, number: int) -> Tensor:
    values = np.random.default_rng([7, rank, number]).normal(size=(TOKENS, 1, models.HIDDEN))
    return torch.from_numpy(values.astype(np.float32)).requires_grad_()


def loop_reference(layer: Any, hidden: Tensor, ids_TK: Tensor, weights: dict[int, list[Tensor]]) -> Tensor:
    """Every expert in one process, a token at a time."""
    flat = hidden.reshape(-1, models.HIDDEN)
    logits = flat @ layer.router.weight.t()
    scores = logits.gather(1, ids_TK).softmax(dim=1)
    rows = []
    for token, ids, of_token in zip(flat, ids_TK.tolist(), scores, strict=True):
        total = torch.zeros(models.HIDDEN)
        for expert, score in zip(ids, of_token, strict=True):
            first, second = weights[expert]
            gate, up = (first @ token).chunk(2)
            total = total + score * (second @ (functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


def all_weights(layer: Any) -> dict[int, list[Tensor]]:
    """Weights of all experts by number, from all ranks."""
    own = {
        models.expert_of_slot(layer, "experts", slot): [p.detach().clone() for p in expert.parameters()]
        for slot, expert in enumerate(layer.experts.local_experts)
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {expert: parts for part in every for expert, parts in part.items()}


def plain_against_loop(world: int) -> float:
    """The largest difference between Megatron's layer and the loop."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    models.join(world)
    layer = models.moe_layer(models.config(1))
    rank = dist.get_rank()
    (ids,) = models.routing(3, rank, 1, 1, TOKENS)[0]
    RouterReplay.set_replay_data([ids])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    hidden = hidden_of(rank, 0)
    out, _ = layer(hidden)
    wanted = loop_reference(layer, hidden, ids, all_weights(layer))
    return float((out - wanted).abs().max())
