"""Layers of Megatron on recorded routing over simulated nodes: the rows that experts get, counted where they enter.

Also what copies take: bytes in spare slots, what autograd keeps, and how often anything travels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.megatron_core import layer_runs, models

from equilibra.core.checks import PlanLimits
from equilibra.core.load import imbalance
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, balance, copies, set_replay
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.trace.open import load_trace

RECORDED_LAYERS = (0, 11, 23)
MICRO_BATCHES, TOKENS = 6, 512


def recorded(traces: Path, rank: int) -> list[list[torch.Tensor]]:
    """[M][L] ids of this rank: consecutive pieces of the recording."""
    ids = load_trace(traces / "gpt-oss-20b.npz").ids[:, RECORDED_LAYERS]
    return [
        [torch.from_numpy(ids[at : at + TOKENS, layer].astype(np.int64)) for layer in range(len(RECORDED_LAYERS))]
        for at in ((m * 4 + rank) * TOKENS for m in range(MICRO_BATCHES))
    ]


def rows_of_experts(traces: Path, per_node: int, spare_slots: int, standing_slots: int) -> dict[str, float]:
    """Imbalance of the rows that enter Megatron's experts, of the plan, and of what our own runtime would plan."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    models.join(4)
    settings = models.config(len(RECORDED_LAYERS), num_moe_experts=32, moe_router_topk=4)
    layers = torch.nn.ModuleList([models.moe_layer(settings) for _ in RECORDED_LAYERS])
    routing, entered_LMR = recorded(traces, dist.get_rank()), np.zeros((len(layers), MICRO_BATCHES, 4))
    setting = MegatronSetting(
        spare_slots=spare_slots, standing_slots=standing_slots, ranks_per_node=per_node, rates=Rates.free()
    )
    balancer = balance(layers, setting)
    step = balancer.begin(routing)
    for number, layer in enumerate(layers):
        counted = _counting(layer.token_dispatcher)
        for m in range(MICRO_BATCHES):
            set_replay([layer.router.router_replay], [routing[m][number]])
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            hidden = torch.zeros(TOKENS, 1, models.HIDDEN, requires_grad=True)
            layer(hidden)[0].sum().backward()
            every: list[Any] = [None] * 4
            dist.all_gather_object(every, counted.pop())
            entered_LMR[number, m] = every
    problem = StepProblem(
        cluster=balancer.group.cluster, given_load=step.load, rates=Rates.free(),
        **PlanLimits(spare_slots=spare_slots, standing_slots=standing_slots, max_moves_per_layer=0).limits(),
    )  # fmt: skip
    ours = planner_named("equilibra").plan(problem)
    return {
        "entered": float(imbalance(entered_LMR).mean()),
        "ours": float(imbalance(ours.rank_load(step.load)).mean()),
        "static": step.static_imbalance, "rows": int(entered_LMR.sum()),
        "standing": step.plan.standing.num_copies,
    }  # fmt: skip


def _counting(dispatcher: Any) -> list[int]:
    """Rows that the dispatcher hands to the experts, call by call."""
    counted, dispatched = list[int](), dispatcher.dispatch_postprocess

    def counting(*arguments: Any) -> Any:
        found = dispatched(*arguments)
        counted.append(len(found[0]))
        return found

    dispatcher.dispatch_postprocess = counting
    return counted


def what_copies_take(path: str, prefetch: bool) -> dict[str, Any]:
    """Three micro-batches in flight before the first backward: bytes of copies, and how often they travel."""
    models.join(4)
    layer = models.moe_layer(models.config(1))
    ids = models.routing(3, dist.get_rank(), 3, 1, layer_runs.TOKENS, skew=2.5)
    setting = MegatronSetting(ranks_per_node=2, path=path, prefetch=prefetch, rates=Rates.free())
    balancer = balance(layer, setting)
    layer.visits.deferred = True  # as under DDP, whose buckets bring gradients home
    step, kept, packed = balancer.begin(ids), list[int](), copies.CopiesOfVisit._pack
    shapes = {tuple(part.shape) for part in layer.visits.homes.parameters()}

    def noted(self: Any, tensor: torch.Tensor) -> Any:
        found = packed(self, tensor)
        standing = self.copies.standing.rows_CP.untyped_storage().data_ptr()
        if tuple(tensor.shape) in shapes and tensor.untyped_storage().data_ptr() != standing:
            kept.append(found.nbytes if torch.is_tensor(found) else 0)
        return found

    copies.CopiesOfVisit._pack = noted  # type: ignore[method-assign]
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    losses = []
    for m in range(3):
        set_replay([layer.router.router_replay], ids[m])
        layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses.append(layer(layer_runs.hidden_of(dist.get_rank(), m))[0].square().sum())
    balancer.recorder.on = True
    for loss in losses:
        loss.backward()
    balancer.copies.bring_home([0])
    found, events = balancer.copies.found, balancer.recorder.taken()
    row = layer.visits.homes.layout.size * 4
    memory = found.memory_bytes()
    held = int((step.plan.standing.rank == dist.get_rank()).sum())
    balancer.end()
    return {
        "kept": kept, "memory": memory, "row": row, "held": held,
        "flash": step.plan.stages[Stage.UPDATE].num_copies, "standing": step.plan.standing.num_copies,
        "events": {int(kind): int((events["kind"] == kind).sum()) for kind in set(events["kind"].tolist())},
    }  # fmt: skip
