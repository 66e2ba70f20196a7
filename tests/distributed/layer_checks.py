"""Single properties of the layer and the balancer, each a function that runs on every rank and returns what it saw."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from tests.distributed.worlds import RandomPlanner, balanced_stack, loss_of, random_batch, reference_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from equilibra.core.errors import EquilibraError
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.events.schema import Kind
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import MoESpec, RouterSpec
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import clip_gradients
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters

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
        low = self.dtype in (torch.bfloat16, torch.float16)
        masters = float32_masters(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if low:
            self.optimizer = torch.optim.AdamW(masters_or_parameters(self.model, masters), lr=1e-2)
        self.balancer = Balancer(
            self.runtime, BalancerSetting(tokens_per_rank=40, planner=self.planner, rates=Rates.free()),
            optimizer=self.optimizer, masters=masters,
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
    weight = world.model.moe[0].experts.gate_up
    gradient = world.balancer.masters[weight].grad
    return {
        "dtype": str(gradient.dtype), "weights": str(weight.dtype), "finite": bool(torch.isfinite(gradient).all()),
    }  # fmt: skip


def stale(group: ExpertGroup) -> dict[str, object]:
    world = World(group)
    world.begin()
    world.update()
    found = {"optimizer before gradients": error_of(world.optimizer.step)}
    found["clip before gradients"] = error_of(lambda: clip_gradients(world.model, world.runtime, 1.0))
    world.balancer.finish_gradients(world.model)
    found["finish twice"] = error_of(lambda: world.balancer.finish_gradients(world.model))
    (first, *_) = world.step.micro_batches(Stage.UPDATE)
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
    world.model.moe[0].experts.down.data.mul_(1.5)  # torch does not count this
    found["change of data"] = error_of(forward)
    world.balancer.weights_changed()
    with first:
        late = loss_of(world.model(world.tokens(first)), 1.0)
    world.balancer.discard_gradients(world.model)
    world.begin()
    found["enter an old micro-batch"] = error_of(forward)
    found["copy the model"] = error_of(lambda: deepcopy(world.model))
    return found


def accumulated(group: ExpertGroup) -> dict[str, object]:
    """Several begins before one optimizer step, and gradients that are thrown away in between."""
    world = World(group, planner="equilibra")
    world.begin()
    world.update()
    world.balancer.discard_gradients(world.model)
    world.update()
    world.begin()  # what copies hold returns first
    world.update()
    world.balancer.finish_gradients(world.model)
    world.wanted()
    world.wanted()
    return {"gap": world.worst_gap(), "copies": world.step.plan.stages[Stage.UPDATE].num_copies}


def masters(group: ExpertGroup) -> dict[str, object]:
    """bfloat16 weights, float32 masters in the optimizer, homes that move."""
    world = World(group, dtype=torch.bfloat16)
    world.balancer.close()
    world.runtime = Runtime(group, world.runtime.placement, world.setting)
    world.model = balanced_stack(world.reference, world.runtime, world.dtype)
    plain = torch.optim.AdamW(world.model.parameters())
    refused = error_of(lambda: Balancer(world.runtime, world.balancer.setting, optimizer=plain))
    copies = float32_masters(world.model)
    optimizer = torch.optim.AdamW(masters_or_parameters(world.model, copies), lr=1e-2)
    world.balancer = Balancer(world.runtime, world.balancer.setting, optimizer=optimizer, masters=copies)
    moved, changed = 0, False
    before = world.model.moe[0].router.weight.detach().clone()
    for _ in range(3):
        world.begin()
        moved += world.step.plan.migration.num_moves
        same = all(torch.equal(weight, master.bfloat16()) for weight, master in copies.items())
        world.update()
        world.balancer.finish_gradients(world.model)
        optimizer.step()
        optimizer.zero_grad()
        changed = not torch.equal(before, world.model.moe[0].router.weight)
    every = all(torch.equal(weight, master.bfloat16()) for weight, master in copies.items())
    return {"refused": refused, "moved": moved, "same": same and every, "changed": changed}


def partly_frozen(group: ExpertGroup) -> dict[str, object]:
    """One part of the experts does not learn: it keeps its values and has no gradient."""
    world = World(group)
    for weights in world.runtime.weights:
        weights.down.requires_grad_(False)
    world.begin()
    world.update()
    world.balancer.finish_gradients(world.model)
    world.wanted()
    homes = torch.from_numpy(world.model.moe[0].experts.experts.astype(np.int64))
    found, wanted = world.model.moe[0].experts.gate_up.grad, world.reference.moe[0].experts["gate_up"].grad[homes]
    return {"gap": float((found - wanted).abs().max()), "none": world.model.moe[0].experts.down.grad is None}


def moved_state_dict(group: ExpertGroup) -> dict[str, object]:
    """torch's own state_dict knows slots, not experts: it must not be loaded once homes have moved."""
    world = World(group)
    kept = {name: value.clone() for name, value in world.model.state_dict().items()}
    same = error_of(lambda: world.model.load_state_dict(kept))
    world.begin()
    moved = not np.array_equal(world.model.moe[0].experts.experts, kept["moe.0.experts._extra_state"].numpy())
    weights = world.model.moe[0].experts.gate_up.detach().clone()
    error = error_of(lambda: world.model.load_state_dict(kept))
    return {
        "same": same, "moved": moved, "error": error,
        "kept": torch.equal(weights, world.model.moe[0].experts.gate_up) or not moved,
    }  # fmt: skip


def refusals(group: ExpertGroup) -> dict[str, str]:
    """Wrong arguments, on one rank or on all."""
    world = World(group)
    wrong = random_batch(np.random.default_rng(0), replace(SPEC, top_k=3), LAYERS, 4).routing_of(0)
    mine = world.batch.routing_of(group.world_rank)
    found = {"routing of one rank": error_of(lambda: world.balancer.begin(wrong if group.rank == 2 else mine))}
    uneven = contiguous(group.cluster, num_layers=LAYERS, num_experts=SPEC.num_experts).home_of_expert.copy()
    uneven[0, -1] = 0
    found["uneven"] = error_of(lambda: Runtime(group, Placement(home_of_expert=uneven, cluster=group.cluster)))
    other = World(group, setting=CopySetting(prefetch_depth=2 if group.rank == 1 else 1))
    found["settings of one rank"] = error_of(other.begin)
    alone = Balancer(world.runtime, BalancerSetting(tokens_per_rank=40, planner=RandomPlanner(5), rates=Rates.free()))
    found["moves without optimizer"] = error_of(lambda: alone.begin(mine))
    alone.close()
    found["closed"] = error_of(lambda: alone.begin(mine))
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
    found["logprob"] = error_of(loss.backward)

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

    def noted_instances(key, direction):
        found = entered(key, direction)
        order.append(f"compute {key.layer} {direction.name.lower()}")
        return found

    engine.fetch, world.runtime.instances = noted_fetch, noted_instances
    world.update()
    world.balancer.finish_gradients()
    rows = world.runtime.recorder.taken()
    slots = world.runtime.memory_bytes()["spare_slots"]
    return {"order": order, "counts": int((rows["kind"] == Kind.COUNTS).sum()), "slots": slots,
            "row": world.runtime.weights[0].layout.size * 8}  # fmt: skip


def transfers_allocate(group: ExpertGroup) -> dict[str, object]:
    """Buffers that the collective path makes in each of three steps, from fetching copies to adding their gradients."""

    class Same:
        name = "same"

        def plan(self, problem):
            return RandomPlanner(8).plan(problem)

    world = World(group, planner=Same())
    world.begin()
    engine = world.runtime._copies._engines[Path.COLLECTIVE]
    counts = []

    def counted(call):
        def noted(*values):
            with Allocations(world.runtime.weights[0].layout.size) as made:
                found = call(*values)
            counts[-1] += made.count
            return SimpleNamespace(wait=counted(found.wait)) if hasattr(found, "wait") else found

        return noted

    for name in ("fetch", "give_back", "gradient_slots"):
        setattr(engine, name, counted(getattr(engine, name)))
    for step in range(3):
        counts.append(0)
        if step:
            world.begin()
        world.update()
        world.balancer.finish_gradients(world.model)
        world.optimizer.step()
        world.optimizer.zero_grad()
    copies = world.step.plan.stages[Stage.UPDATE].num_copies
    return {"counts": counts, "copies": copies, "staged": engine._sent.num_bytes, "gradients": engine.gradients.nbytes,
            "transfers": world.runtime.memory_bytes()["transfers"]}  # fmt: skip


class Allocations(TorchDispatchMode):
    """Counts tensors for whole experts that are made anew, empty ones left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.numel() and found.shape[-1:] == (self.width,):
            self.count += found.untyped_storage().data_ptr() not in known
        return found


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


CHECKS = (
    autocast, low_precision, stale, outside, same_twice, prefetch, transfers_allocate, switched_off, too_few_slots,
    frozen, live, accumulated, masters, partly_frozen, moved_state_dict, refusals,
)  # fmt: skip


def all_checks() -> dict[str, dict[str, object]]:
    group = join_expert_group(CLUSTER, timeout_s=30)
    found = {}
    for check in CHECKS:
        torch.manual_seed(group.rank)
        found[check.__name__] = check(group)
    return found
