"""Distributed checkpoints of balanced models: saved under one placement, loaded under another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from tests.megatron_core import models
from tests.megatron_core.gpt_runs import Training

from equilibra.core.errors import EquilibraError, InputError, RankLostError
from equilibra.core.plan import Stage
from equilibra.plan.planner import planner_named

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def described(training: Training, *, loading: bool, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = metadata or METADATA
    model = training.model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
    }


@contextmanager
def own_processes() -> Iterator[None]:
    """Megatron writes checkpoints with processes of its own, one of which would outlive this one."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False
    with multiprocessing.get_context("spawn").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        yield
        filesystem_async._results_queue = None


def save(training: Training, folder: str) -> None:
    from megatron.core import dist_checkpointing

    with own_processes():
        dist_checkpointing.save(described(training, loading=False), folder)


def load(training: Training, folder: str) -> None:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(described(training, loading=True), folder)
    training.model.module.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])


def gap(one: Training, other: Training) -> float:
    theirs = other.weights()
    return max(float((value - theirs[name]).abs().max()) for name, value in one.weights().items())


def permuted_to_identity(folder: str, numbered_by_slot: bool = False) -> dict[str, Any]:
    """Train with shuffled homes, save, load into a plain model and into one with other homes, train on."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    models.join(2)
    trained = Training({}).balance("shuffled")
    for number in range(2):
        trained.step(number)
    if numbered_by_slot:  # a control: as if slots were experts
        for layer in trained.layers:
            layer.visits.moved = False
    refused = _refuses(trained)
    save(trained, folder)
    RouterReplay.clear_global_router_replay_instances()
    plain, moved = Training({}), Training({}).balance("shuffled")
    for one in (plain, moved):
        one.step(7)  # Adam has state then
        load(one, folder)
    result: dict[str, Any] = {"plain": gap(trained, plain), "moved": gap(trained, moved), "refused": refused}
    result["losses"] = [[one.step(number) for number in (3, 4)] for one in (trained, plain, moved)]
    return result


def _refuses(training: Training) -> list[str]:
    """What is said about a format that knows no experts: by the model, and by the optimizer."""
    said = []
    bad = {"distrib_optim_sharding_type": "dp_reshardable"}
    model = training.model.module.sharded_state_dict(metadata=METADATA)
    for attempt in (
        lambda: training.model.module.sharded_state_dict(metadata=bad),
        lambda: training.optimizer.sharded_state_dict(model, metadata=bad),
    ):
        try:
            attempt()
        except InputError as error:
            said.append(str(error))
    return said


def switched_off() -> dict[str, Any]:
    """A planner that becomes static brings homes back, slot by slot, with their state."""
    models.join(2)
    training, plain = Training({}).balance("shuffled"), Training({})
    losses = [[one.step(number) for number in range(2)] for one in (training, plain)]
    moved = not training.balancer.slots.is_contiguous
    training.homes, training.balancer.planner = "stay", planner_named("static")
    for found, one in zip(losses, (training, plain), strict=True):
        found.append(one.step(2))
    return {
        "moved": moved, "back": training.balancer.slots.is_contiguous, "losses": losses, "gap": gap(training, plain),
        "copies": training.steps[-1].plan.stages[Stage.UPDATE].num_copies,
    }  # fmt: skip


def exported() -> dict[str, Any]:
    """Numbers that exporters give experts, under moved homes."""
    from equilibra.integrations.megatron import expert_parameters

    models.join(2)
    training = Training({}).balance("shuffled")
    training.step(0)
    wanted, before = training.weights(), [layer.visits.homes.expert_of_home for layer in training.layers]
    gaps = []
    for layer, expert, part, parameter in expert_parameters(training.model):
        gaps.append(float((parameter - wanted[f"decoder.layers.{layer}.mlp.experts.{expert}.{part}"]).abs().max()))
    by_rank = [_gap_by_rank(training, wanted)]
    for numbered in (training.balancer.homes_restored, training.balancer.logical_weights):
        with numbered():
            gaps.append(_gap_by_rank(training, wanted))
        by_rank.append(_gap_by_rank(training, wanted))
    said: list[str] = []
    with heard(said), training.balancer.logical_weights():
        training.step(1)
    weights, after = training.weights(), [layer.visits.homes.expert_of_home for layer in training.layers]
    gaps += [float((value - weights[name]).abs().max()) for name, value in wanted.items()]
    return {
        "gap": max(gaps), "count": len(gaps), "same homes": before == after, "homes": before, "by rank": by_rank,
        "said": said,
    }  # fmt: skip


def _gap_by_rank(training: Training, wanted: dict[str, Any]) -> float:
    """The gap to weights by logical number, for an exporter that numbers experts by rank, as slime's and others do."""
    gaps = []
    for name, parameter in training.model.module.named_parameters():
        head, at, tail = name.partition("local_experts.")
        if at:
            slot, _, part = tail.partition(".")
            number = int(slot) + dist.get_rank() * models.NUM_EXPERTS // dist.get_world_size()
            gaps.append(float((parameter - wanted[f"{head}{number}.{part}"]).abs().max()))
    return max(gaps)


def export_fails() -> dict[str, Any]:
    """Homes after an exporter failed on one rank, and after a move was cut off while it ran."""
    from equilibra.integrations.megatron import balancer as module

    models.join(2)
    training = Training({}).balance("shuffled")
    training.step(0)
    wanted, before = training.weights(), [layer.visits.homes.expert_of_home for layer in training.layers]
    said: list[str] = []
    moved = not training.balancer.slots.is_contiguous
    with heard(said), training.balancer.homes_restored():
        if dist.get_rank() == 0:
            raise OSError("the disk is full")
    after, weights = [layer.visits.homes.expert_of_home for layer in training.layers], training.weights()
    gap = max(float((value - weights[name]).abs().max()) for name, value in wanted.items())

    def cut_off(*_arguments: Any) -> int:
        raise RankLostError("cut off")

    with heard(said), training.balancer.homes_restored():
        module.move_layer = cut_off
        training.shuffle(7)
    for attempt in (training.balancer.restore_homes, lambda: training.balancer.begin(training.routing(1))):
        with heard(said):
            attempt()
    return {"same homes": before == after, "moved": moved, "gap": gap, "said": said}


@contextmanager
def heard(said: list[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, EquilibraError) as error:
        said.append(f"{type(error).__name__}: {error}")
