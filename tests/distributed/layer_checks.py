"""Single properties of the layer and the balancer, each a function that runs on every rank and returns what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tests.distributed.worlds import RandomPlanner, balanced_stack, loss_of, random_batch, reference_stack
from torch.utils.checkpoint import checkpoint

from equilibra.core.cluster import Cluster
from equilibra.core.errors import EquilibraError
from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.balancer import Balancer, BalancerSetting
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.spec import MoESpec, RouterSpec
from equilibra.execute.transfer import Path
from equilibra.measure.events import Kind

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)
SPEC = MoESpec(hidden=8, expert_ffn=6, num_experts=8, top_k=2, router=RouterSpec(), shared_ffn=4, expert_bias=True)
LAYERS = 3


@dataclass
class World:
    """A small model under a random plan, ready to run."""

    group: ExpertGroup
    dtype: torch.dtype = torch.float64
    setting: CopySetting = field(default_factory=CopySetting)
    planner: object = RandomPlanner(5)
    seed: int = 3

    def __post_init__(self) -> None:
        placement = contiguous(self.group.cluster, num_layers=LAYERS, num_experts=SPEC.num_experts)
        self.runtime = Runtime(self.group, placement, self.setting)
        self.reference = reference_stack(SPEC, LAYERS, self.dtype, self.seed)
        self.model = balanced_stack(self.reference, self.runtime, self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.balancer = Balancer(
            self.runtime, BalancerSetting(tokens_per_rank=40, planner=self.planner, rates=Rates.free()),
            optimizer=self.optimizer,
        )  # fmt: skip
        self.batch = random_batch(
            np.random.default_rng(self.seed), SPEC, LAYERS, self.group.world_size, dtype=self.dtype
        )

    def begin(self):
        self.step = self.balancer.begin(self.batch.routing_of(self.group.world_rank))
        sent = self.step.send(self.batch.data_of(self.group.world_rank))
        self.data = dict(zip(self.step.sequences.tolist(), sent, strict=True))
        return self.step

    def tokens(self, micro_batch):
        parts = [self.data[s] for s in micro_batch.sequences.tolist()]
        return torch.cat([torch.empty(0, SPEC.hidden, dtype=self.dtype), *parts])

    def update(self, run=lambda model, x: model(x)):
        for micro_batch in self.step.micro_batches(Stage.UPDATE):
            with micro_batch:
                loss_of(run(self.model, self.tokens(micro_batch)), 1.0).backward()

    def wanted(self):
        """Gradients of the reference."""
        for s, tokens in enumerate(self.batch.tokens):
            loss_of(self.reference(tokens, self.batch.replay(s)), 1.0).backward()
        return self.reference

    def worst_gap(self):
        worst = 0.0
        for mine, theirs in zip(self.model.moe, self.reference.moe, strict=True):
            homes = torch.from_numpy(mine.experts.experts.astype(np.int64))
            for name in mine.experts.names:
                found, wanted = (
                    mine.experts.get_parameter(name).grad.double(),
                    theirs.experts[name].grad[homes].double(),
                )
                worst = max(worst, float((found - wanted).abs().max() / (theirs.experts[name].grad.abs().max() + 1e-4)))
        return worst


def error_of(function) -> str:
    try:
        function()
    except (EquilibraError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def autocast(group: ExpertGroup) -> dict[str, object]:
    world = World(group, dtype=torch.float32)
    world.begin()

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    world.update(run)
    world.balancer.finish_gradients(world.model)
    world.wanted()
    return {"gap": world.worst_gap(), "dtype": str(world.model.moe[0].experts.gate_up.grad.dtype)}


def low_precision(group: ExpertGroup) -> dict[str, object]:
    world = World(group, dtype=torch.bfloat16)
    world.begin()
    world.update()
    world.balancer.finish_gradients()
    return {
        "dtype": str(world.model.moe[0].experts.gate_up.grad.dtype),
        "weights": str(world.model.moe[0].experts.gate_up.dtype),
        "finite": bool(torch.isfinite(world.model.moe[0].experts.gate_up.grad).all()),
    }


def stale(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    world.begin()
    world.update()
    found = {"optimizer before gradients": error_of(world.optimizer.step)}
    world.balancer.finish_gradients(world.model)
    (first, *_) = world.step.micro_batches(Stage.UPDATE)
    with first:
        loss = loss_of(world.model(world.tokens(first)), 1.0)
    with first:
        loss.backward()
    world.balancer.finish_gradients(world.model)
    with first:
        late = loss_of(world.model(world.tokens(first)), 1.0)
    world.optimizer.step()
    with first:
        found["backward of old weights"] = error_of(late.backward)
    with torch.no_grad():
        world.model.moe[0].experts.down.mul_(1.0)

    def forward():
        with first:
            world.model(world.tokens(first))

    found["unnoticed change"] = error_of(forward)
    world.balancer.weights_changed()
    found["after notice"] = error_of(forward)
    return found


def outside(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    world.begin()
    (first, *_) = world.step.micro_batches(Stage.UPDATE)
    with first:
        loss = loss_of(world.model(world.tokens(first)), 1.0)
    found = {"backward": error_of(loss.backward)}
    with first:
        loss = loss_of(checkpoint(world.model, world.tokens(first), use_reentrant=False), 1.0)
    found["recompute"] = error_of(loss.backward)

    def wrong_tokens():
        with first:
            world.model(world.tokens(first).repeat(2, 1)[: first.num_tokens + 1])

    found["tokens"] = error_of(wrong_tokens) if first.num_tokens else "InputError"
    return found


def same_twice(group: ExpertGroup) -> dict[str, object]:
    """Two runs of the same seed agree to the bit, on both paths and at any depth."""

    def run(path: Path, depth: int) -> list[torch.Tensor]:
        world = World(group, setting=CopySetting(path=dict.fromkeys(Stage, path), prefetch_depth=depth))
        for _ in range(2):
            world.begin()
            world.update()
            world.balancer.finish_gradients(world.model)
            world.optimizer.step()
            world.optimizer.zero_grad()
        world.balancer.close()
        return [parameter.detach().clone() for parameter in world.model.parameters()]

    one, others = run(Path.COLLECTIVE, 1), [run(Path.COLLECTIVE, 1), run(Path.HOST, 0), run(Path.HOST, 3)]
    return {"equal": all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))}


def prefetch(group: ExpertGroup) -> dict[str, object]:
    """What is fetched before which layer computes; and that planned micro-batches exchange no counts."""
    world = World(group)
    world.begin()
    order: list[str] = []
    engine = world.runtime._copies._engines[Path.COLLECTIVE]
    fetch, entered = engine.fetch, world.runtime.instances

    def noted_fetch(copies, version, slots):
        order.append(f"fetch {copies.layer}")
        return fetch(copies, version, slots)

    def noted_instances(visit, direction):
        found = entered(visit, direction)
        order.append(f"compute {visit.where.layer} {direction.name.lower()}")
        return found

    engine.fetch, world.runtime.instances = noted_fetch, noted_instances
    world.update()
    world.balancer.finish_gradients()
    rows = world.runtime.recorder.taken()
    slots = world.runtime.memory_bytes()["spare_slots"]
    return {"order": order, "counts": int((rows["kind"] == Kind.COUNTS).sum()), "slots": slots,
            "row": world.runtime.weights[0].layout.size * 8}  # fmt: skip


def switched_off(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    world.begin()
    moved = world.step.plan.migration.num_moves
    world.balancer.setting = replace(world.balancer.setting, planner="static")
    step = world.begin()
    world.update()
    world.balancer.finish_gradients(world.model)
    world.wanted()
    plain = contiguous(group.cluster, num_layers=LAYERS, num_experts=SPEC.num_experts)
    return {
        "moved": moved, "contiguous": world.runtime.placement == plain, "gap": world.worst_gap(),
        "copies": step.plan.standing.num_copies + step.plan.stages[Stage.UPDATE].num_copies,
    }  # fmt: skip


def too_few_slots(group: ExpertGroup) -> dict[str, object]:
    world = World(group, setting=CopySetting(spare_slots=2))
    world.runtime.setting = CopySetting(spare_slots=0)
    original = world.planner.plan

    class Greedy:
        name = "greedy"

        def plan(self, problem):
            return original(replace(problem, spare_slots=3))

    world.balancer.setting = replace(world.balancer.setting, planner=Greedy())
    return {"error": error_of(world.begin)}


def frozen(group: ExpertGroup) -> dict[str, object]:
    """Experts that do not learn, and hidden states that need no gradient."""
    world = World(group)
    world.begin()
    for weights in world.runtime.weights:
        for part in weights.parts():
            part.requires_grad_(False)
    world.update()
    world.balancer.finish_gradients(world.model)
    for moe in world.reference.moe:
        moe.experts.requires_grad_(False)
    world.wanted()
    router = world.model.moe[1].router.weight.grad
    wanted = world.reference.moe[1].router.weight.grad
    return {"gap": float((router - wanted).abs().max()), "none": world.model.moe[0].experts.gate_up.grad is None}


def live(group: ExpertGroup) -> dict[str, object]:
    """Without a micro-batch: routed live to the homes, as a rollout on the same ranks does it."""
    world = World(group)
    x = torch.randn(7 + group.rank, SPEC.hidden, dtype=torch.float64, requires_grad=True)
    out = world.model(x)
    out.sum().backward()
    again = x.detach().requires_grad_()
    wanted = world.reference(again, torch.full((len(x), LAYERS, SPEC.top_k), -1))
    wanted.sum().backward()
    return {"out": float((out - wanted).detach().abs().max()), "dx": float((x.grad - again.grad).abs().max())}


CHECKS = (autocast, low_precision, stale, outside, same_twice, prefetch, switched_off, too_few_slots, frozen, live)


def all_checks() -> dict[str, dict[str, object]]:
    group = join_expert_group(CLUSTER, timeout_s=30)
    found = {}
    for check in CHECKS:
        torch.manual_seed(group.rank)
        found[check.__name__] = check(group)
    return found
