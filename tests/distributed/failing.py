"""Ways for a step to go wrong on one rank, for tests of what the others then see."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch
from tests.distributed.worlds import RandomPlanner, balanced_stack, loss_of, random_batch, random_spec, reference_stack

from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.copies.transfer import Path
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting

TIMEOUT_S = 6.0
CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)


def fail_at(
    point: str, how: str, path: Path, victim: int = 1, device: str = "cpu", timeout_s: float = TIMEOUT_S
) -> str:
    """Train; at the named point the victim dies, fails or falls silent. Returns if nothing was noticed."""
    with join_expert_group(CLUSTER, timeout_s=timeout_s) as group:
        return _train(group, point, how, path, victim, torch.device(device))


def _train(group: ExpertGroup, point: str, how: str, path: Path, victim: int, device: torch.device) -> str:
    timeout_s = group.timeout_s
    rng = np.random.default_rng(11)
    spec = random_spec(rng, group.num_ranks)
    placement = contiguous(CLUSTER, num_layers=2, num_experts=spec.num_experts)
    runtime = Runtime(group, placement, CopySetting(path=dict.fromkeys(Stage, path)))
    model = balanced_stack(reference_stack(spec, 2, torch.float64, 0), runtime, torch.float64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    setting = BalancerSetting(tokens_per_rank=40, planner=RandomPlanner(3), rates=Rates.free())
    balancer = Balancer(runtime, setting, optimizer=optimizer)

    def hit() -> None:
        if group.rank == victim:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "fail":
                raise ValueError("a defect on one rank")
            elif how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            elif how == "silent":
                time.sleep(4 * timeout_s)
            elif how == "slow":
                time.sleep(timeout_s / 3)

    _place(point, hit, runtime, balancer)
    for number in range(2):
        batch = random_batch(np.random.default_rng(number), spec, 2, group.world_size)
        if point == "another plan" and group.rank == victim:
            balancer.setting = BalancerSetting(tokens_per_rank=40, planner=RandomPlanner(99), rates=Rates.free())
        step = balancer.begin(batch.routing_of(group.world_rank))
        data = dict(zip(step.sequences.tolist(), step.send(batch.data_of(group.world_rank)), strict=True))
        for micro_batch in step.micro_batches(Stage.UPDATE):
            parts = [data[s] for s in micro_batch.sequences.tolist()]
            with micro_batch:
                out = model(torch.cat([torch.empty(0, spec.hidden, dtype=torch.float64), *parts]).to(device))
                loss = loss_of(out, 1.0)
                loss.backward()
            float(loss)  # as a program does that reports it: the host waits for the device
        balancer.finish_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return "finished"


def _place(point: str, hit, runtime: Runtime, balancer: Balancer) -> None:
    """Make one function of this rank hit first."""
    owners = {
        "gather": (runtime.group, "gather"), "dispatch": (runtime, "tables"), "copies": (runtime, "instances"),
        "gradients": (runtime, "backward"), "standing": (runtime, "finish_gradients"), "arm": (runtime, "arm"),
        "plan": (balancer, "_plan"), "migration": (runtime, "disarm"), "optimizer": (runtime, "weights_changed"),
    }  # fmt: skip
    if point not in owners:
        return
    owner, name = owners[point]
    plain, calls = getattr(owner, name), []

    def hooked(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            hit()
        return plain(*args, **kwargs)

    object.__setattr__(owner, name, hooked)
