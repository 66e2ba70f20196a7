"""Gradients over ranks, each check a function that runs on every rank and returns what it saw."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.layer_checks import World, error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from equilibra.core.placement import Cluster
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.steps.balancer import Balancer
from equilibra.execute.steps.gradients import check_replicated, clip_gradients, gradient_norm

DOCS = Path(__file__).parents[2] / "docs" / "runtime.md"


def documented_recipe() -> str:
    """The code under the heading on FSDP2."""
    return DOCS.read_text().partition("### Dense parameters under FSDP2")[2].split("```python\n")[1].split("```")[0]


def sharded(world: World, recipe: str) -> torch.optim.Optimizer:
    """Run the recipe on a world's model, and attach its optimizer."""
    world.balancer.close()
    names = {
        "runtime": world.runtime, "model": world.model, "layers": [*world.model.dense, *world.model.moe],
        "device_type": "cpu", "dist": dist, "torch": torch, "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
    }  # fmt: skip
    exec(recipe, names)
    world.balancer = Balancer(world.runtime, world.balancer.setting, optimizer=names["optimizer"])
    return names["optimizer"]


def gaps(world: World) -> dict[str, float]:
    """How far dense and expert gradients are from the reference's, relative to the largest of each tensor."""
    wanted = dict(world.reference.named_parameters())
    worst = 0.0
    for name, parameter in world.model.named_parameters():
        if ".experts." not in name:
            found, want = parameter.grad.full_tensor(), wanted[name].grad
            worst = max(worst, float((found - want).abs().max() / want.abs().max()))
    return {"dense": worst, "experts": world.worst_gap()}


def fsdp(group: ExpertGroup) -> dict[str, object]:
    found = {}
    for dtype in (torch.float64, torch.float32):
        world = World(group, dtype=dtype)
        optimizer = sharded(world, documented_recipe())
        world.begin()
        world.update()
        world.balancer.finish_gradients(world.model)
        world.wanted()
        grads = [p.grad for p in world.reference.parameters()]
        wanted = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        seen = gaps(world)
        seen["norm"] = abs(clip_gradients(world.model, world.runtime, wanted / 3) / wanted - 1)
        seen["clipped"] = abs(gradient_norm(world.model, world.runtime) / (wanted / 3) - 1)
        before = world.model.embed.weight.full_tensor().clone()
        optimizer.step()
        seen["stepped"] = not torch.equal(before, world.model.embed.weight.full_tensor())
        found[str(dtype)] = seen
    return found


def naive_fsdp(group: ExpertGroup) -> dict[str, object]:
    """The recipe without the lines that make sums of means, and one that shards experts too."""
    lines = documented_recipe().splitlines()
    world = World(group)
    sharded(world, "\n".join(line for line in lines if "part.set_" not in line))
    world.begin()
    world.update()
    found = {"refused": error_of(lambda: world.balancer.finish_gradients(world.model))}
    world.balancer.finish_gradients()  # what was documented before
    world.wanted()
    found["shares"] = float(
        (world.model.embed.weight.grad.full_tensor() / world.reference.embed.weight.grad).median()
    )  # fmt: skip
    found["experts"] = world.worst_gap()
    other = World(group)
    sharded(other, "\n".join(lines).replace(", ignored_params=experts", ""))
    found["sharded experts"] = error_of(other.begin)
    return found


def wrappers(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    before = [parameter.detach().clone() for parameter in world.model.parameters()]
    return {
        "ddp": error_of(lambda: DistributedDataParallel(world.model)),
        "kept": all(torch.equal(a, b) for a, b in zip(before, world.model.parameters(), strict=True)),
        "dense alone": error_of(lambda: DistributedDataParallel(nn.Linear(2, 2))),
        "fsdp1": error_of(lambda: FullyShardedDataParallel(world.model, device_id=torch.device("cpu"))),
    }


def different(group: ExpertGroup) -> dict[str, object]:
    """Dense weights that are not the same on all ranks."""
    found = {}
    for what in ("nothing", "router", "sign", "buffer"):
        world = World(group)
        world.model.register_buffer("scale", torch.ones(3))
        world.model.register_buffer("cache", torch.full((3,), float(group.rank)), persistent=False)
        with torch.no_grad():
            if what == "router" and group.world_rank == group.world_size - 1:
                world.model.moe[1].router.weight[0, 0] += 1e-12
            if what == "sign":
                world.model.embed.bias.zero_()
                if group.world_rank == 1:
                    world.model.embed.bias.neg_()
            if what == "buffer" and group.world_rank == 1:
                world.model.scale[2] = 2.0
        world.begin()
        world.update()
        found[what] = error_of(lambda world=world: world.balancer.finish_gradients(world.model))
    world = World(group)
    if group.world_rank == 1:
        world.model.more = nn.Linear(2, 2)
    found["shape"] = error_of(lambda: check_replicated(world.model, world.runtime))
    return found


def used_on_some_ranks(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    torch.manual_seed(5)
    world.model.some, world.model.none = (nn.Linear(3, 1, bias=False, dtype=torch.float64) for _ in range(2))
    if group.world_rank == 1:
        world.model.some(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    world.begin()
    world.update()
    world.balancer.finish_gradients(world.model)
    return {"some": world.model.some.weight.grad.tolist(), "none": world.model.none.weight.grad is None}


def nonfinite(group: ExpertGroup) -> dict[str, object]:
    """A NaN in the gradient of an expert that one rank has: every rank sees the same."""
    world = World(group)
    world.begin()
    world.update()
    world.balancer.finish_gradients(world.model)
    finite = gradient_norm(world.model, world.runtime)
    if group.rank == 1:
        world.model.moe[2].experts.down.grad[0, 0, 0] = math.nan
    kept = world.model.embed.weight.grad.clone()
    norm = clip_gradients(world.model, world.runtime, 1e-3, error_if_nonfinite=False)
    return {
        "finite": finite, "norm": str(norm), "kept": torch.equal(kept, world.model.embed.weight.grad),
        "error": error_of(lambda: clip_gradients(world.model, world.runtime, 1e-3)),
        "expert": int(np.flatnonzero(world.runtime.placement.home_of_expert[2] == 1)[0]),
    }  # fmt: skip


def scaler(group: ExpertGroup) -> dict[str, object]:
    """An infinity in one rank's expert makes all ranks skip the step; the next one is taken."""
    world = World(group, dtype=torch.float16, planner="static")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    changed = []
    for step in range(3):
        world.begin()
        for micro_batch in world.step.micro_batches(list(world.step.plan.stages)[-1]):
            with micro_batch:
                scaler.scale(world.model(world.tokens(micro_batch)).float().sum() * 1e-2).backward()
        if step == 1 and group.rank == 1:
            world.model.moe[0].experts.down.grad[0, 0, 0] = math.inf
        world.balancer.finish_gradients(world.model, scaler=scaler)
        before = [parameter.detach().clone() for parameter in world.balancer.masters.values()]
        scaler.step(world.optimizer)
        scaler.update()
        world.optimizer.zero_grad()
        after = world.balancer.masters.values()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return {"changed": changed, "scale": scaler.get_scale()}


CHECKS = (fsdp, naive_fsdp, wrappers, different, used_on_some_ranks, nonfinite, scaler)


def all_checks(num_nodes: int, ranks_per_node: int) -> dict[str, dict[str, object]]:
    group = join_expert_group(Cluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node), timeout_s=30)
    found = {}
    for check in CHECKS:
        torch.manual_seed(group.rank)
        found[check.__name__] = check(group)
    return found
