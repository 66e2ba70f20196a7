"""Moving homes: to the bit, in bounded memory, and never half."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import collect, run_ranks, start_ranks
from tests.distributed.states import EXPERTS, World, make_world, merged, to

from equilibra.core.errors import EquilibraError
from equilibra.core.placement import Cluster, Migration, Placement
from equilibra.events.schema import Kind, Resource
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.state import migrate as module
from equilibra.execute.state.checkpoint import Checkpoints, checkpoint_steps
from equilibra.execute.state.migrate import Carried, migrate, optimizer_tensors

WORLD = 4


def carried_of(world: World) -> Carried:
    return optimizer_tensors(world.optimizer, world.masters)


def stacked(world: World) -> dict[str, torch.Tensor]:
    """Everything [H, ...] on this rank."""
    return {
        f"{layer}.{part}{name}": tensor
        for layer, weights in enumerate(world.runtime.weights)
        for part in weights.names
        for name, tensor in world.named_state(weights.get_parameter(part))
        if tensor.ndim
    }


def gathered(world: World) -> dict[str, torch.Tensor]:
    """The slow way, first half: everything [E, ...] in logical order, on every rank."""
    group, found = world.runtime.group, {}
    for key, tensor in stacked(world).items():
        layer = int(key.split(".")[0])
        every: list[Any] = [None] * group.num_ranks
        mine = (world.runtime.weights[layer].experts.tolist(), tensor.detach().clone())
        dist.all_gather_object(every, mine, group=group.channels[Channel.STANDING])
        full = torch.empty(EXPERTS, *tensor.shape[1:], dtype=tensor.dtype)
        for experts, rows in every:
            full[experts] = rows
        found[key] = full
    return found


def equals_slow_way(world: World, full: dict[str, torch.Tensor], placement: Placement) -> bool:
    """The second half: what this rank must have now."""
    same = True
    for key, tensor in stacked(world).items():
        homes = np.flatnonzero(placement.home_of_expert[int(key.split(".")[0])] == world.runtime.group.rank)
        same &= torch.equal(tensor.detach(), full[key][torch.from_numpy(homes)])
    return same


@contextmanager
def watched() -> Iterator[SimpleNamespace]:
    """What migrations on this rank send, exchange and allocate."""
    seen = SimpleNamespace(num_bytes=0, num_exchanges=0, staging_bytes=0)
    staging, columns = module._staging, module.move_columns

    def take(num_bytes, device):
        seen.staging_bytes += num_bytes
        return staging(num_bytes, device)

    def move(group, moves, columns_Hw, into):
        seen.num_exchanges += 1
        seen.num_bytes += columns_Hw.shape[1] * len(moves.leaving_slots)
        columns(group, moves, columns_Hw, into)

    module._staging, module.move_columns = take, move
    try:
        yield seen
    finally:
        module._staging, module.move_columns = staging, columns


def there_and_back(nodes: int, ranks_per_node: int, foreach: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if foreach else torch.float32
    world = make_world(nodes, ranks_per_node, masters=True, dtype=dtype, foreach=foreach)
    runtime, rank = world.runtime, world.runtime.group.rank
    world.train(2)
    full, first = gathered(world), world.digests()
    pointers = {key: (id(tensor), tensor.data_ptr()) for key, tensor in stacked(world).items()}
    expert_bytes = sum(t[0].nbytes for key, t in stacked(world).items() if key.startswith("0."))
    version, found, results = runtime.version, {}, []
    for seed in (1, 2, 3, None):
        migration = to(world, seed, still=1)
        runtime.recorder.begin_step()
        with watched() as result:
            migrate(runtime, migration, carried_of(world), max_bytes=1024)
        results.append(result)
        assert equals_slow_way(world, full, migration.after)
        assert runtime.placement == migration.after
        for layer, weights in enumerate(runtime.weights):
            homes = np.flatnonzero(migration.after.home_of_expert[layer] == rank)
            assert weights.experts.tolist() == homes.tolist()
            assert weights.experts.dtype == np.int32
        moves = migration.moves()
        assert not (moves[:, 0] == 1).any()  # the layer that stays
        assert len(moves) > 0
        assert result.num_bytes == expert_bytes * int((moves[:, 2] == rank).sum())
        assert result.staging_bytes <= 1024
        assert result.num_exchanges > 2 * len(runtime.weights[0].names) * 4  # two layers, four tensors each, in pieces
        events = runtime.recorder.taken()
        assert (events["kind"] == Kind.MIGRATION).all()
        arrived = moves[moves[:, 3] == rank]
        assert sorted(zip(events["layer"], events["expert"], events["peer"], strict=True)) == sorted(
            (layer, expert, source) for layer, expert, source, _ in arrived.tolist()
        )
        assert (events["bytes"] == expert_bytes).all()
        across = events["peer"] // ranks_per_node != rank // ranks_per_node
        assert (events["resource"] == np.where(across, Resource.NIC, Resource.NVLINK)).all()
    assert runtime.version == version + 4
    assert {key: (id(tensor), tensor.data_ptr()) for key, tensor in stacked(world).items()} == pointers
    assert world.digests() == first  # the identity
    # the same in one piece, and with nothing to do
    with watched() as once:
        migrate(runtime, to(world, 1, still=1), carried_of(world))
    assert once.num_exchanges < results[0].num_exchanges
    assert equals_slow_way(world, full, runtime.placement)
    with watched() as nothing:
        migrate(runtime, to(world, 1, still=1), carried_of(world))
    assert nothing == SimpleNamespace(num_bytes=0, num_exchanges=0, staging_bytes=0)
    # a comparison that could not fail would be worth nothing
    parameter = runtime.weights[0].parts()[0]
    with torch.no_grad():
        parameter.copy_(parameter.flip(0).clone())
    assert not equals_slow_way(world, full, runtime.placement)
    found["staging"] = [result.staging_bytes for result in results]
    return found


@pytest.mark.parametrize(("nodes", "per_node", "foreach"), [(2, 2, False), (1, 2, True)])
def test_homes_move_to_the_bit_and_back(nodes: int, per_node: int, foreach: bool) -> None:
    found = run_ranks(nodes * per_node, there_and_back, nodes, per_node, foreach)
    assert all(part == found[0] for part in found)


def train_with_moves(seeds: list[int | None], masters: bool) -> dict[str, str]:
    world = make_world(2, 1, masters=masters, dtype=torch.float32)
    for seed in seeds:
        world.train(2)
        migrate(world.runtime, to(world, seed), carried_of(world), max_bytes=2048)
    world.train(1)
    return world.digests()


def test_training_does_not_notice_moves() -> None:
    """Also under two expert-parallel groups: both move."""
    still = merged(run_ranks(4, train_with_moves, [None, None], False))
    moved = merged(run_ranks(4, train_with_moves, [5, 6], False))
    assert moved == still
    # a run in which moments were left behind is another run
    assert merged(run_ranks(4, _weights_only, [5, 6])) != still


def _weights_only(seeds: list[int | None]) -> dict[str, str]:
    world = make_world(2, 1, dtype=torch.float32)
    for seed in seeds:
        world.train(2)
        migrate(world.runtime, to(world, seed))
    world.train(1)
    return world.digests()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except torch.OutOfMemoryError as error:
        return f"RankLostError, on the rank itself: {error}"
    except EquilibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> list[str]:
    world = make_world(1, WORLD)
    runtime, rank = world.runtime, world.runtime.group.rank
    world.train(1)
    before, errors = world.digests(), []
    cluster = Cluster(num_nodes=1, ranks_per_node=WORLD)

    def attempt(change: Callable[[], Any] | None = None, **setting: Any) -> None:
        migration = setting.pop("migration", to(world, 1))
        errors.append(error_of(lambda: migrate(runtime, migration, carried_of(world), **setting)))
        if change:
            change()
        assert world.digests() == before
        assert runtime.broken is None

    uneven = runtime.placement.home_of_expert.copy()
    uneven[2, 0] = 3
    after = Placement(home_of_expert=uneven, cluster=cluster)
    attempt(migration=Migration(before=runtime.placement, after=after))
    attempt(migration=Migration(before=to(world, 2).after, after=to(world, 3).after))
    attempt(max_bytes=32)
    # what only one rank sees is an error on all of them
    parameter = runtime.weights[1].parts()[0]
    if rank == 2:
        parameter.grad = torch.ones_like(parameter)
    attempt(world.zero_grad)
    kept = world.optimizer.state[parameter]["exp_avg"]
    if rank == 1:
        world.optimizer.state[parameter]["exp_avg"] = kept.flatten()[:5]  # in blocks, say
    attempt(lambda: world.optimizer.state[parameter].update(exp_avg=kept))
    if rank == 3:
        world.optimizer.state[parameter].pop("exp_avg")
    attempt(lambda: world.optimizer.state[parameter].update(exp_avg=kept))
    staging = module._staging
    if rank == 2:

        def full(num_bytes: int, device: torch.device) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} on {device}")

        module._staging = full
    attempt()
    module._staging = staging
    # a zero gradient does not matter, and after all that homes can move
    for part in runtime.weights[1].parts():
        part.grad = torch.zeros_like(part)
    migration = to(world, 1)
    assert migration.num_moves
    migrate(runtime, migration, carried_of(world))
    runtime.broken = "a migration was cut off; load the last checkpoint"
    errors.append(error_of(lambda: migrate(runtime, to(world, None))))
    return errors


def test_what_cannot_move_changes_nothing_anywhere() -> None:
    found = list(zip(*run_ranks(WORLD, refusals), strict=True))
    for said, kind, words in zip(
        found,
        ["InputError", "InputError", "BudgetError", "InputError", "InputError", "MismatchError", "Rank", "BrokenState"],
        ["equally many", "another placement", "max_bytes", "zero_grad", "with a row", "tensors", "allocate", "cut off"],
        strict=True,
    ):
        for text in said:
            assert text.startswith(kind), text
            assert words in text, text
    assert all("on rank 2" in found[3][r] for r in (0, 1, 3))


def cut_off(folder: Path, when: str) -> tuple[str, str | None, bool, str, str, int]:
    """Save, then move homes with a rank that ends before, while, or after they move."""
    world = make_world(2, 2, timeout_s=10)
    runtime, rank = world.runtime, world.runtime.group.rank
    world.train(1)
    checkpoints = Checkpoints(folder / "run", runtime, world.model, world.optimizer, timeout_s=10)
    checkpoints.save(1)
    before = world.digests()
    (folder / f"digests-{rank}.json").write_text(json.dumps(before))
    move, vote = module.move_columns, ExpertGroup.all_succeed
    calls: list[int] = []

    def dies_while(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        move(*arguments)

    def dies_at_last(group: ExpertGroup, attempt: Callable[[], Any], *, what: str) -> Any:
        if what.startswith("hearing"):
            os.kill(os.getpid(), signal.SIGKILL)
        return vote(group, attempt, what=what)

    if rank == 2:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif when == "while":
            module.move_columns = dies_while
        elif when == "last":
            ExpertGroup.all_succeed = dies_at_last  # type: ignore[method-assign, assignment]
    moved = error_of(lambda: migrate(runtime, to(world, 1), carried_of(world), max_bytes=1024))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    broken, same = runtime.broken, world.digests() == before
    homes = error_of(lambda: world.train(1))
    saved = error_of(lambda: checkpoints.save(2))
    return moved, broken, same, homes, saved, max(checkpoint_steps(folder / "run"), default=None) or 0


@pytest.mark.parametrize("when", ["before", "while", "last", "after"])
def test_a_rank_that_dies_never_leaves_a_mixed_state(tmp_path: Path, when: str) -> None:
    processes, pipes, _ = start_ranks(4, cut_off, tmp_path, when)
    outcomes = collect(processes, pipes, timeout_s=60)
    assert outcomes[2].died == -signal.SIGKILL
    for outcome in outcomes[:2] + outcomes[3:]:
        assert outcome.error is None
        moved, broken, same, trained, saved, latest = outcome.value
        assert latest == 1
        if when == "after":
            assert (moved, broken) == ("no error", None)
            assert trained.startswith("RankLostError")
            assert saved.startswith("RankLostError")
        elif when == "before":
            assert moved.startswith("RankLostError")
            assert broken is None
            assert same  # nothing had moved
        else:
            assert moved.startswith("RankLostError")
            assert broken is not None
            assert "load the last checkpoint" in broken
            assert not same
            assert trained == f"BrokenStateError: {broken}"
            assert saved == f"BrokenStateError: cannot save a checkpoint: {broken}"
    written = merged(json.loads(path.read_text()) for path in tmp_path.glob("digests-*.json"))
    world = make_world(1, 1, seed=9)
    Checkpoints(tmp_path / "run", world.runtime, world.model, world.optimizer).load()
    assert world.digests() == written
