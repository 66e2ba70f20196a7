"""Train a random model on several ranks under a plan and in one process without, and say how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from tests.distributed.worlds import (
    Batch,
    RandomPlanner,
    Stack,
    balanced_stack,
    loss_of,
    random_batch,
    random_spec,
    reference_stack,
)
from tests.protocol.calls import Call
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.copies import device_paths
from equilibra.execute.copies.transfer import Path
from equilibra.execute.group import join_expert_group
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import clip_gradients
from equilibra.execute.steps.step import Step, executed_rows


@dataclass
class Gaps:
    """Largest relative differences seen, and what was exercised."""

    out: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    first: float = 0.0
    """of all but weights, before the first optimizer step"""
    seen: dict[str, int] = field(default_factory=dict)
    asked: list[Call] = field(default_factory=list)
    """what the rank asked of its engine, where it was recorded"""
    wanted: list[Call] = field(default_factory=list)
    """what the model of the protocol asks"""

    def count(self, **more: int) -> None:
        for name, value in more.items():
            self.seen[name] = self.seen.get(name, 0) + value

    def worst(self) -> float:
        return max(self.out, self.gradient, self.norm, self.weights)


def gap(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    difference = (found.detach() - wanted.detach()).abs().max()
    return float(difference / (wanted.detach().abs().max() + 1e-4))


ON_HOST = (Path.COLLECTIVE, Path.HOST)


def train_cases(
    seeds: list[int], cluster: Cluster, unrecorded: float = 0.0, sabotage: str = "", device: str = "cpu",
    among: tuple[Path, ...] = ON_HOST,
) -> list[Gaps]:  # fmt: skip
    """Every case is a few steps of training; all ranks return the same kind of answer."""
    group = join_expert_group(cluster, timeout_s=30)
    return [train_case(seed, group, unrecorded, sabotage, device, among) for seed in seeds]


def train_case(seed: int, group, unrecorded: float, sabotage: str, device: str = "cpu", among=ON_HOST) -> Gaps:
    rng = np.random.default_rng(seed)
    dtype = torch.float64
    spec, num_layers = random_spec(rng, group.num_ranks), int(rng.integers(1, 4))
    reference = reference_stack(spec, num_layers, dtype, seed).to(device)
    paths = {stage: Path(rng.choice([path.value for path in among])) for stage in Stage}
    setting = CopySetting(spare_slots=int(rng.integers(0, 4)), prefetch_depth=int(rng.integers(0, 3)), path=paths)
    placement = contiguous(group.cluster, num_layers=num_layers, num_experts=spec.num_experts)
    runtime = Runtime(group, placement, setting)
    model = balanced_stack(reference, runtime, dtype).to(device)
    options = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    plain = torch.optim.AdamW(reference.parameters(), **options)
    planner = rng.choice(["equilibra", "random", "random", "static"])
    balancer = Balancer(
        runtime,
        BalancerSetting(
            tokens_per_rank=int(rng.integers(12, 40)),
            planner=RandomPlanner(seed) if planner == "random" else str(planner),
            standing_slots=int(rng.integers(0, 3)), move_sequences=bool(rng.integers(2)), rates=Rates.free(),
        ),
        optimizer=optimizer,
    )  # fmt: skip
    gaps = Gaps()
    gaps.count(**{f"planner_{planner}": 1})
    if sabotage:
        _sabotage(runtime, sabotage)
    batches = [
        random_batch(rng, spec, num_layers, group.world_size, unrecorded=unrecorded).to(device) for _ in range(3)
    ]
    ahead = False
    for number, batch in enumerate(batches):
        step = balancer.begin() if ahead else balancer.begin(batch.routing_of(group.world_rank))
        ahead = bool(rng.integers(2)) and number + 1 < len(batches)
        logprob(step, model, reference, batch, gaps)
        halves = min(2 if rng.random() < 0.4 else 1, step.plan.num_micro_batches)
        mode = str(rng.choice(["none", "full", "selective", "in flight"]))
        for half in range(halves):
            mine = lambda m: m * halves // step.plan.num_micro_batches == half  # noqa: B023, E731
            chosen = np.flatnonzero([mine(m) for m in step.plan.schedule.micro_batch_of_sequence])
            part = [micro_batch for micro_batch in step.micro_batches(Stage.UPDATE) if mine(micro_batch.number)]
            update(step, balancer, model, reference, batch, part, chosen, mode, (optimizer, plain), rng, gaps)
            if number == 0 and half == 0:
                gaps.first = gaps.worst()
            if ahead and half == 0:
                balancer.prepare(batches[number + 1].routing_of(group.world_rank))
        compare_weights(model, reference, gaps)
        _check_counts(step, gaps)
        part = step.plan.stages[Stage.UPDATE]
        gaps.count(
            flash=part.num_copies, standing=step.plan.standing.num_copies, moves=step.plan.migration.num_moves,
            live=step.tokens_without_routing, tolerant=int((~step.as_planned_M).sum()), **{f"mode {mode}": 1},
            from_standing=int(sum(
                step.plan.placement.home_of_expert[problem // step.plan.num_micro_batches, expert] != origin
                for problem, expert, origin in zip(part.problem_of_copy(), part.expert, part.origin, strict=True)
            )),
        )  # fmt: skip
    balancer.close()
    return gaps


def _tokens(step: Step, batch: Batch, micro_batch: MicroBatch, data: dict[int, Tensor]) -> Tensor:
    parts = [data[s] for s in micro_batch.sequences.tolist()]
    width = batch.tokens[0].shape[1]
    return torch.cat([batch.tokens[0].new_empty(0, width), *parts])


def _data(step: Step, batch: Batch) -> dict[int, Tensor]:
    sent = step.send(batch.data_of(step.runtime.group.world_rank))
    device = batch.tokens[0].device
    return dict(zip(step.sequences.tolist(), [part.to(device) for part in sent], strict=True))


def _wanted(reference: Stack, batch: Batch, sequences: np.ndarray) -> Tensor:
    parts = [reference(batch.tokens[s], batch.replay(s)) for s in sequences.tolist()]
    return torch.cat([batch.tokens[0].new_empty(0, batch.tokens[0].shape[1]), *parts])


def logprob(
    step: Step, model: Stack, reference: Stack, batch: Batch, gaps: Gaps, mini_batch: int | None = None
) -> None:
    data = _data(step, batch)
    with torch.no_grad():
        for micro_batch in step.micro_batches(Stage.LOGPROB, mini_batch):
            with micro_batch:
                out = model(_tokens(step, batch, micro_batch, data))
            gaps.out = max(gaps.out, gap(out, _wanted(reference, batch, micro_batch.sequences)))


def _run(model: Stack, x: Tensor, mode: str) -> Tensor:
    if mode == "full":
        return checkpoint(model, x, use_reentrant=False)
    if mode == "selective":
        kept = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

        def policy(_context, operation, *_args, **_kwargs):
            return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint(
            model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    return model(x)


def update(step, balancer, model, reference, batch, part, chosen, mode, optimizers, rng, gaps) -> None:
    """Train both on a part of the step: these micro-batches of this rank, which hold these sequences of all ranks."""
    data = _data(step, batch)
    total = sum(len(tokens) for tokens in batch.tokens)
    optimizer, plain = optimizers
    optimizer.zero_grad()
    plain.zero_grad()
    waiting = []
    padding = rng.random() < 0.3 and mode == "none"  # groups have different numbers of micro-batches: draw no more
    for micro_batch in part:
        if padding:
            x = _tokens(step, batch, micro_batch, data)
            micro_batch.rows = torch.arange(len(x), device=x.device) * 2
            padded = torch.zeros(2 * len(x) + 1, x.shape[1], dtype=x.dtype, device=x.device)
            padded[micro_batch.rows] = x
            with micro_batch:
                out = _run(model, padded, mode)[micro_batch.rows]
        else:
            with micro_batch:
                out = _run(model, _tokens(step, batch, micro_batch, data), mode)
        waiting.append((micro_batch, loss_of(out, 1 / total)))
        if mode != "in flight":
            _backward(waiting, gaps)
    _backward(waiting, gaps)
    balancer.finish_gradients(model)
    if chosen.size:
        loss_of(_wanted(reference, batch, chosen), 1 / total).backward()
    _compare_gradients(model, reference, gaps)
    norm = clip_gradients(model, balancer.runtime, 0.5)
    wanted = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
    gaps.norm = max(gaps.norm, abs(norm - wanted) / (wanted + 1e-9))
    optimizer.step()
    plain.step()
    optimizer.zero_grad()


def _backward(waiting: list[tuple[MicroBatch, Tensor]], gaps: Gaps) -> None:
    while waiting:
        micro_batch, loss = waiting.pop(0)
        with micro_batch:
            loss.backward()


def _pairs(model: Stack, reference: Stack):
    for (name, mine), (_, theirs) in zip(
        model.embed.named_parameters(), reference.embed.named_parameters(), strict=True
    ):
        yield f"embed.{name}", mine, theirs, slice(None)
    for (name, mine), (_, theirs) in zip(
        model.dense.named_parameters(), reference.dense.named_parameters(), strict=True
    ):
        yield f"dense.{name}", mine, theirs, slice(None)
    for layer, (mine, theirs) in enumerate(zip(model.moe, reference.moe, strict=True)):
        for name, parameter in mine.router.named_parameters():
            yield f"{layer}.router.{name}", parameter, theirs.router.get_parameter(name), slice(None)
        if mine.shared is not None:
            for name, parameter in mine.shared.named_parameters():
                yield f"{layer}.shared.{name}", parameter, theirs.shared.get_parameter(name), slice(None)
        homes = torch.from_numpy(mine.experts.experts.astype(np.int64))
        for name in mine.experts.names:
            yield f"{layer}.experts.{name}", mine.experts.get_parameter(name), theirs.experts[name], homes


def _compare_gradients(model: Stack, reference: Stack, gaps: Gaps) -> None:
    """Each relative to its own size, or to a millionth of the model's largest gradient.

    Some are nothing but rounding: a router that chooses one expert and divides its weight by itself has none.
    """
    every = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    floor = 1e-4 + 1e-6 * max((float(gradient.abs().max()) for gradient in every), default=0.0)
    for _, mine, theirs, rows in _pairs(model, reference):
        found = torch.zeros_like(mine) if mine.grad is None else mine.grad
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        difference = float((found - wanted[rows]).abs().max()) if found.numel() else 0.0
        gaps.gradient = max(gaps.gradient, difference / (float(wanted.abs().max()) + floor))


def compare_weights(model: Stack, reference: Stack, gaps: Gaps) -> None:
    for _, mine, theirs, rows in _pairs(model, reference):
        gaps.weights = max(gaps.weights, gap(mine, theirs[rows]))


def _check_counts(step: Step, gaps: Gaps) -> None:
    """Where nothing was routed live, what ran is what was planned, exactly."""
    plan, load, group = step.plan, step.armed.load, step.runtime.group
    rows = np.concatenate(group.gather(step.runtime.recorder.taken(), what="events"))
    shape = (plan.num_layers, plan.num_micro_batches, plan.cluster.num_ranks)
    for stage in Stage:
        ran = executed_rows(rows, shape, stage)
        planned = plan.rank_load(load, stage)
        exact = np.flatnonzero(step.as_planned_M)
        assert np.array_equal(ran[:, exact], planned[:, exact]), "executed and planned token counts differ"
        gaps.count(counted=int(ran.sum()))


def _sabotage(runtime: Runtime, how: str) -> None:
    """Negative controls: each breaks one thing that the comparison must notice; but for what several GPUs would do."""
    if how == "drop gradients of copies":
        for weights in runtime.weights:
            weights.add_gradient = lambda _expert, *_rows: None
    elif how == "swap two experts":
        with torch.no_grad():
            for part in runtime.weights[0].parts():
                if len(part) > 1:
                    part[[0, 1]] = part[[1, 0]].clone()
    elif how == "pull gradients":
        device_paths.share_a_gpu = lambda *_: False
    else:
        raise AssertionError(how)
