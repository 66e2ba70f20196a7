"""A model in bf16 with float32 masters on ranks that share a GPU: what a plan with copies and moves changes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from time import perf_counter

import numpy as np
import torch
from tests.distributed.worlds import RandomPlanner, balanced_stack, loss_of, random_batch, reference_stack

from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import Activation, MoESpec
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters

DEVICE = torch.device("cuda")
LAYERS = 3


@contextmanager
def no_waiting_for_the_device():
    """An error where the host waits for the device; gloo's exchange of tokens does, NCCL's would not."""
    exchange = ExpertGroup.all_to_all

    def all_to_all(self, *args, **kwargs):
        torch.cuda.set_sync_debug_mode("default")
        try:
            pending = exchange(self, *args, **kwargs)
            pending.wait()
        finally:
            torch.cuda.set_sync_debug_mode("error")
        return pending

    ExpertGroup.all_to_all = all_to_all
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        ExpertGroup.all_to_all = exchange


def bf16_steps(cluster, path: str, planner: str, bias: bool, watched: bool = False, seed: int = 7):
    """Two steps: the loss of all ranks, and the gradients of all experts at home here, by number."""
    group = join_expert_group(cluster, timeout_s=60)
    spec = MoESpec(
        hidden=128, expert_ffn=96, num_experts=4 * group.num_ranks, top_k=3, expert_bias=bias,
        activation=Activation.CLAMPED_SWIGLU if bias else Activation.SWIGLU,
    )  # fmt: skip
    reference, rng = reference_stack(spec, LAYERS, torch.float32, seed), np.random.default_rng(seed)
    setting = CopySetting(spare_slots=3, path=dict.fromkeys(Stage, Path(path)))
    runtime = Runtime(group, contiguous(cluster, num_layers=LAYERS, num_experts=spec.num_experts), setting)
    model = balanced_stack(reference, runtime, torch.float32).to(DEVICE, torch.bfloat16)
    masters = float32_masters(model)
    optimizer = torch.optim.SGD(masters_or_parameters(model, masters), lr=1e-2)
    chosen = RandomPlanner(seed) if planner == "random" else planner
    balancer = Balancer(
        runtime, BalancerSetting(tokens_per_rank=64, planner=chosen, rates=Rates.free(), move_sequences=False),
        optimizer=optimizer, masters=masters,
    )  # fmt: skip
    found = {"losses": [], "gradients": [], "copies": 0, "moves": 0, "events": []}
    for _ in range(2):
        batch = random_batch(rng, spec, LAYERS, group.world_size, dtype=torch.bfloat16).to(DEVICE)
        found["losses"].append(_step(balancer, model, batch, watched, found))
        torch.cuda.synchronize()
        took_us = (perf_counter() - runtime.recorder.began) * 1e6
        found["events"].append((runtime.recorder.taken(), took_us))
        found["gradients"].append({
            (layer, int(expert), name): part.float().cpu().numpy()
            for layer, weights in enumerate(runtime.weights) for name in weights.names
            for expert, part in zip(weights.experts, masters[weights.get_parameter(name)].grad, strict=True)
        })  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return found


def _step(balancer, model, batch, watched: bool, found) -> float:
    group = balancer.runtime.group
    step = balancer.begin(batch.routing_of(group.world_rank))
    sent = [part.to(DEVICE) for part in step.send(batch.data_of(group.world_rank))]
    data, width = dict(zip(step.sequences.tolist(), sent, strict=True)), batch.tokens[0].shape[1]
    total = torch.zeros((), device=DEVICE)
    for micro_batch in step.micro_batches(Stage.UPDATE):
        x = torch.cat([batch.tokens[0].new_empty(0, width), *[data[s] for s in micro_batch.sequences.tolist()]])
        with micro_batch, no_waiting_for_the_device() if watched else nullcontext():
            loss = loss_of(model(x).float(), 1e-3)
            loss.backward()
            total += loss.detach()
    balancer.finish_gradients(model)
    every = group.gather(total.double().cpu()[None].numpy(), what="losses")
    found["copies"] += step.plan.stages[Stage.UPDATE].num_copies
    found["moves"] += step.plan.migration.num_moves
    return float(np.concatenate(every).sum())
