"""Many steps, and steps between which weights leave the GPU: what memory and handles a rank holds."""

from __future__ import annotations

import gc
import threading
from pathlib import Path as File
from time import monotonic

import numpy as np
import torch
from tests.distributed.worlds import RandomPlanner, balanced_stack, loss_of, random_batch, reference_stack

from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import MoESpec
from equilibra.execute.group import join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting

DEVICE = torch.device("cuda", 0)
LAYERS = 2


class Run:
    """A model on one rank, and its steps."""

    def __init__(self, cluster: Cluster, path: Path, *, width: int = 16) -> None:
        torch.cuda.set_device(DEVICE)
        self.group = join_expert_group(cluster, timeout_s=60)
        self.spec = MoESpec(hidden=width, expert_ffn=width, num_experts=4 * self.group.num_ranks, top_k=2)
        placement = contiguous(cluster, num_layers=LAYERS, num_experts=self.spec.num_experts)
        self.runtime = Runtime(self.group, placement, CopySetting(path=dict.fromkeys(Stage, path)))
        plain = reference_stack(self.spec, LAYERS, torch.float32, 0)
        self.model = balanced_stack(plain, self.runtime, torch.float32).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        setting = BalancerSetting(tokens_per_rank=40, planner=RandomPlanner(3), rates=Rates.free())
        self.balancer = Balancer(self.runtime, setting, optimizer=self.optimizer)
        self.copies = 0

    def step(self, number: int) -> float:
        batch = random_batch(
            np.random.default_rng(number), self.spec, LAYERS, self.group.world_size, dtype=torch.float32
        )
        step = self.balancer.begin(batch.routing_of(self.group.world_rank))
        sent = step.send(batch.data_of(self.group.world_rank))
        data = dict(zip(step.sequences.tolist(), sent, strict=True))
        total = torch.zeros((), device=DEVICE)
        for micro_batch in step.micro_batches(Stage.UPDATE):
            parts = [data[s] for s in micro_batch.sequences.tolist()]
            x = torch.cat([torch.empty(0, self.spec.hidden), *parts]).to(DEVICE)
            with micro_batch:
                loss = loss_of(self.model(x), 1e-3)
                loss.backward()
            total += loss.detach()
        self.balancer.finish_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.copies += step.plan.stages[Stage.UPDATE].num_copies
        return float(np.concatenate(self.group.gather(total.cpu()[None].numpy(), what="losses")).sum())

    def held(self) -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize(DEVICE)
        status = File("/proc/self/status").read_text()
        return {
            "allocated": torch.cuda.memory_allocated(DEVICE), "reserved": torch.cuda.memory_reserved(DEVICE),
            "host": int(status.partition("VmRSS:")[2].split()[0]) * 1024,
            "files": len([*File("/proc/self/fd").iterdir()]),
            "maps": len(File("/proc/self/maps").read_text().splitlines()), "threads": threading.active_count(),
            "system_threads": len([*File("/proc/self/task").iterdir()]),
        }  # fmt: skip


def many_steps(cluster: Cluster, path: Path, seconds: float) -> tuple[int, dict[str, int], dict[str, int]]:
    """Train for so long; what was held after a tenth of the time, and at the end."""
    run, number, end = Run(cluster, path), 0, monotonic() + seconds
    early: dict[str, int] = {}
    while True:
        run.step(number % 50)
        number += 1
        if number % 25 == 0:
            left = float(np.concatenate(run.group.gather(np.array([end - monotonic()]), what="time")).min())
            if left < 0.75 * seconds and not early:
                early = run.held()
            if left < 0:
                break
    late = run.held()
    assert run.copies > 0
    run.balancer.close()
    run.group.watch.close()
    return number, early, late


def offloaded(cluster: Cluster, path: Path) -> tuple[list[float], list[float], list[tuple[int, int, int]]]:
    """Losses of steps with and without weights that leave the GPU in between; bytes of experts, before, after."""
    plain, found, held = Run(cluster, path, width=256), Run(cluster, path, width=256), []
    wanted = [plain.step(number) for number in range(3)]
    plain.balancer.close()
    del plain
    losses = []
    for number in range(3):
        losses.append(found.step(number))
        found.balancer.release()
        before = found.held()["allocated"]
        experts = [part for weights in found.runtime.weights for part in weights.parts()]
        num_bytes = sum(part.nbytes for part in experts)
        for part in experts:
            part.data = part.data.cpu()
        torch.cuda.ipc_collect()
        held.append((num_bytes, before, found.held()["allocated"]))
        for part in experts:
            part.data = part.data.to(DEVICE)
    found.balancer.close()
    return wanted, losses, held


def one_step(cluster: Cluster, path: Path, expandable: bool) -> tuple[float, str]:
    """The loss of a step, and the path that `auto` took for the update."""
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    run = Run(cluster, path)
    loss = run.step(0)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()) == expandable
    chosen = run.runtime._copies._path[Stage.UPDATE].value
    run.balancer.close()
    return loss, chosen
