"""Checkpoints: any world loads what any other wrote, to the bit; complete or not there; nothing read can run code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.distributed.ranks import collect, run_ranks, start_ranks
from tests.distributed.states import HIDDEN, World, make_world, merged, to
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from equilibra.core.errors import BrokenStateError, EquilibraError, InputError, UnreadableError
from equilibra.execute.experts import MoESpec
from equilibra.execute.state import checkpoint as module
from equilibra.execute.state import checkpoint_files
from equilibra.execute.state.checkpoint import Checkpoints, checkpoint_steps
from equilibra.execute.state.checkpoint_files import read_manifest
from equilibra.execute.state.migrate import migrate, optimizer_tensors

EXTRA = {"seed": 7, "name": "run", "rate": 1e-3, "list": [1, [2.5, None, True]], "rng": torch.arange(5).to(torch.uint8)}


def checkpoints_of(world: World, folder: Path, **setting: Any) -> Checkpoints:
    return Checkpoints(folder, world.runtime, world.model, world.optimizer, masters=world.masters, **setting)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except EquilibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- worlds of several ranks ---


def save_world(folder: Path, masters: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Train, move, save; then train on."""
    world = make_world(2, 2, placement_seed=3, masters=masters, dtype=torch.float32)
    world.train(2)
    migrate(world.runtime, to(world, 4), optimizer_tensors(world.optimizer, world.masters))
    checkpoints = checkpoints_of(world, folder)
    # only what world rank 0 says is kept
    checkpoints.save(12, {**EXTRA, "steps": world.steps} if world.runtime.group.world_rank == 0 else {"other": 1})
    saved = world.digests()
    world.train(1)
    return saved, world.digests()


def load_world(folder: Path, nodes: int, per_node: int, masters: bool, used: bool) -> tuple[dict[str, str], bool]:
    """Load into a model with other weights and homes; `used`: its optimizer has state already."""
    world = make_world(nodes, per_node, placement_seed=8, seed=99, masters=masters, dtype=torch.float32)
    if used:
        world.train(1)
    with torch.no_grad():
        world.optimizer.param_groups[0]["lr"] = 5.0
    before, version = world.digests(), world.runtime.version
    loaded = checkpoints_of(world, folder).load()
    assert loaded.step == 12
    assert same(loaded.extra, {**EXTRA, "steps": 2})
    assert world.optimizer.param_groups[0]["lr"] == 1e-2
    assert world.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert world.runtime.version > version
    world.runtime.weights[0].check_version(0)
    after = world.digests()
    return after, all(
        before[name] != after[name] for name in before if name.endswith(("gate_up", "down", "embed.weight"))
    )


def go_on(folder: Path, masters: bool) -> dict[str, str]:
    """The world that wrote it, restarted with plain homes."""
    world = make_world(2, 2, seed=99, masters=masters, dtype=torch.float32)
    world.steps = checkpoints_of(world, folder).load(12).extra["steps"]
    world.train(1)
    return world.digests()


@pytest.mark.parametrize("masters", [False, True])
def test_any_world_loads_what_another_wrote(tmp_path: Path, masters: bool) -> None:
    folder = tmp_path / "run"
    found = run_ranks(4, save_world, folder, masters)
    saved, later = merged(part[0] for part in found), merged(part[1] for part in found)
    assert later != saved
    worlds = [(2, 1, 2)] if masters else [(1, 1, 1), (4, 2, 1)]
    for used, (world, nodes, per_node) in enumerate(worlds):
        loaded = run_ranks(world, load_world, folder, nodes, per_node, masters, used % 2 == 1)
        assert merged(part[0] for part in loaded) == saved
        assert all(part[1] for part in loaded)
    if masters:
        assert merged(run_ranks(4, go_on, folder, masters)) == later


def one_bad_byte(folder: Path) -> tuple[list[str], bool]:
    """What one rank finds damaged is an error on all, and no rank's memory has changed."""
    world = make_world(1, 2)
    world.train(1)
    checkpoints = checkpoints_of(world, folder)
    checkpoints.save(1)
    errors, before, rank = [], world.digests(), world.runtime.group.rank
    for name in ("__0_0.distcp", "__1_0.distcp", "manifest.json"):
        path = folder / "step-00000001" / name
        raw = path.read_bytes()
        checkpoints._ranks.barrier(what="reading")
        if rank == 0:
            path.write_bytes(raw[:700] + bytes([raw[700] ^ 1]) + raw[701:])
        checkpoints._ranks.barrier(what="damage")
        errors.append(error_of(checkpoints.load))
        checkpoints._ranks.barrier(what="loading")
        if rank == 0:
            path.write_bytes(raw)
        checkpoints._ranks.barrier(what="repair")
    unchanged = world.digests() == before
    checkpoints.load()
    # an optimizer that keeps other things on one rank
    if rank == 1:
        world.optimizer.state[world.runtime.weights[0].parts()[0]].pop("exp_avg")
    errors.append(error_of(lambda: checkpoints.save(2)))
    return errors, unchanged and checkpoint_steps(folder) == [1]


def test_damage_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for errors, unchanged in run_ranks(2, one_bad_byte, tmp_path / "run"):
        assert unchanged
        for text, name in zip(errors[:3], ("__0_0.distcp", "__1_0.distcp", "manifest.json"), strict=True):
            assert text.startswith("InputError"), text
            assert name in text
            assert "damaged" in text
        assert errors[3].startswith("MismatchError")


def full_disk(folder: Path, real: bool, asynchronous: bool) -> tuple[str, str, str]:
    """The first save fits, the second does not. Where there is no small disk, one rank's writer says so."""
    world = make_world(1, 2)
    world.train(1)
    checkpoints, ballast, write = checkpoints_of(world, folder, keep=1), folder.parent / "ballast", fill_up
    first = error_of(lambda: checkpoints.save(1))
    if not real and world.runtime.group.rank == 1:
        checkpoint_files._write_tensors = write  # type: ignore[assignment]
    elif real and world.runtime.group.rank == 0:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    checkpoints._ranks.barrier(what="filling the disk")
    second = error_of(lambda: checkpoints.save(2, asynchronous=asynchronous).wait())
    ballast.unlink(missing_ok=True)
    checkpoints._ranks.barrier(what="emptying the disk")
    saved = world.digests()
    checkpoints._pending = module.Saving()  # its failure was seen
    checkpoints.load()
    assert world.digests() == saved
    return first, second, ",".join(names(folder))


def fill_up(folder: Path, state: dict[str, torch.Tensor], rank: int) -> None:
    (folder / f"__{rank}_0.distcp").write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is really small: that needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    real = (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
    yield disk, real
    if real:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint(small_disk: tuple[Path, bool], asynchronous: bool) -> None:
    for real in {False, small_disk[1]}:
        folder = small_disk[0] / f"run-{real}"
        for first, second, there in run_ranks(2, full_disk, folder, real, asynchronous):
            assert first == "no error"
            assert second.startswith("InputError"), second
            assert "No space left" in second
            assert there == "step-00000001"
        shutil.rmtree(folder)


# --- kill -9 ---


def save_until_killed(folder: Path, seed: int) -> str:
    """Save again and again; every state is written down before it is saved."""
    world = make_world(1, 2, placement_seed=seed, timeout_s=10)
    checkpoints, rank = checkpoints_of(world, folder / "run", timeout_s=10), world.runtime.group.rank
    world.train(1)
    for step in range(1, 1000):
        with torch.no_grad():
            for parameter in world.model.parameters():
                parameter.add_(1)
        (folder / f"digests-{step}-{rank}.json").write_text(json.dumps(world.digests()))
        saving = checkpoints.save(step, {"step": step}, asynchronous=step % 3 == 0)
        if step % 2:
            saving.wait()
    return "never killed"


def loads_the_last(folder: Path, *, least: int) -> int:
    """The last checkpoint is good, and the next save clears away what is not; returns its step."""
    found = max(checkpoint_steps(folder / "run"), default=None)
    assert found is not None
    assert found >= least
    world = make_world(1, 1, seed=5)
    checkpoints = checkpoints_of(world, folder / "run")
    assert checkpoints.load().extra == {"step": found}
    written = [json.loads(path.read_text()) for path in folder.glob(f"digests-{found}-*.json")]
    assert world.digests() == merged(written)
    checkpoints.save(found + 1)
    assert names(folder / "run")[-1] == f"step-{found + 1:08d}"
    assert not [name for name in names(folder / "run") if "." in name]
    return found


def kill_while_saving(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    processes, pipes, _ = start_ranks(2, save_until_killed, folder, seed)
    while not checkpoint_steps(folder / "run"):
        time.sleep(0.01)
        assert all(process.is_alive() for process in processes)
    time.sleep(rng.random() * 0.4)
    victim = rng.randrange(3)
    for rank, process in enumerate(processes):
        if victim in (rank, 2):
            process.kill()
    outcomes = collect(processes, pipes, timeout_s=40)
    for rank, outcome in enumerate(outcomes):
        if victim in (rank, 2):
            assert outcome.died == -signal.SIGKILL
        else:
            assert outcome.error is not None
            assert outcome.error.startswith("RankLostError"), outcome.error
    loads_the_last(folder, least=1)


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_saving(tmp_path: Path, seed: int) -> None:
    kill_while_saving(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_killed_while_saving_many_times(tmp_path: Path, seed: int) -> None:
    kill_while_saving(tmp_path, seed)


def die_at(folder: Path, name: str, after: bool) -> str:
    """Save step 1, then step 2 again over step 2 with a rank that ends at a certain call."""
    world = make_world(1, 2, timeout_s=10)
    checkpoints, rank = checkpoints_of(world, folder / "run", timeout_s=10), world.runtime.group.rank
    (folder / f"digests-2-{rank}.json").write_text(json.dumps(world.digests()))
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2})
    owner = module if hasattr(module, name) else Path
    real = getattr(owner, name)

    def dies(*arguments: Any, **named: Any) -> Any:
        if name != "rename" or arguments[0].suffix == ".part":
            result = real(*arguments, **named) if after else None
            os.kill(os.getpid(), signal.SIGKILL)
            return result
        return real(*arguments, **named)

    if rank == (1 if name == "write_shard" else 0):
        setattr(owner, name, dies)
    return error_of(lambda: checkpoints.save(2, {"step": 2}))


@pytest.mark.parametrize(
    ("name", "after"),
    [("begin_part", True), ("write_shard", False), ("write_shard", True), ("finish", True), ("rename", False)],
)
def test_killed_at_a_certain_call(tmp_path: Path, name: str, after: bool) -> None:
    processes, pipes, _ = start_ranks(2, die_at, tmp_path, name, after)
    outcomes = collect(processes, pipes, timeout_s=40)
    died = 1 if name == "write_shard" else 0
    assert outcomes[died].died == -signal.SIGKILL
    assert outcomes[1 - died].value.startswith("RankLostError")
    if died == 0:
        assert any("." in found for found in names(tmp_path / "run"))  # something was left
    assert loads_the_last(tmp_path, least=2) == 2


# --- one process ---


@pytest.fixture
def world() -> World:
    torch.manual_seed(0)
    made = make_world(1, 1)
    made.train(1)
    return made


def restamp(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """What somebody who knows the format can do: change files and make the manifest say so."""
    body = json.loads((folder / "manifest.json").read_text())
    for name in body["files"]:
        raw = (folder / name).read_bytes()
        body["files"][name] = {"num_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    if change:
        change(body)
    body.pop("sha256")
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


def test_checkpoints_come_and_go(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    checkpoints = checkpoints_of(world, folder)
    assert max(checkpoint_steps(folder), default=None) is None
    with pytest.raises(InputError, match="no such folder"):
        checkpoints.load()
    digests = {}
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step})
        digests[step] = world.digests()
        world.train(1)
    assert checkpoint_steps(folder) == [2, 3]
    assert names(folder) == ["step-00000002", "step-00000003"]
    assert checkpoints.load(2).extra == {"step": 2}
    assert world.digests() == digests[2] != digests[3]
    with pytest.raises(InputError, match=r"no checkpoint of step 1 in .*: there are 2, 3"):
        checkpoints.load(1)
    # from step 2 on another way: what came of the first way is not the last checkpoint any more
    world.train(1)
    checkpoints.save(2, {"step": "again"})
    assert names(folder) == ["step-00000002", "step-00000003.aside"]
    assert checkpoints.load().extra == {"step": "again"}
    # what was set aside can be taken back
    (folder / "step-00000003.aside").rename(folder / "step-00000003")
    assert checkpoints.load().extra == {"step": 3}
    assert world.digests() == digests[3]
    checkpoints.load(2)
    checkpoints.save(3, {"step": "again"})
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000003.aside"]
    checkpoints.load(2)
    checkpoints.save(3, {"step": "once more"})
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000003.aside", "step-00000003.aside-2"]
    for path in folder.glob("step-00000003*"):
        shutil.rmtree(path)
    # another run in the same folder
    other = make_world(1, 1)
    with pytest.raises(InputError, match=r"cannot save step 1 in .* has step 2: it is of another run"):
        checkpoints_of(other, folder).save(1)
    assert checkpoint_steps(folder) == [2]
    fresh = checkpoints_of(other, folder, keep=1)
    fresh.load()
    fresh.save(3)
    assert checkpoint_steps(folder) == [3]
    for step in (-1, 1.5):
        with pytest.raises(InputError, match="whole number"):
            fresh.save(step)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="keep"):
        checkpoints_of(other, folder, keep=0)


def test_what_cannot_be_read_now_is_not_damaged(world: World, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(world, tmp_path / "run")
    checkpoints.save(1, {"turn": 1})
    before = world.digests()
    for name in ("__0_0.distcp", "manifest.json"):
        file = tmp_path / "run" / "step-00000001" / name
        file.rename(tmp_path / name)
        file.mkdir() if name == "manifest.json" else file.symlink_to(file)  # the system refuses: ELOOP, EISDIR
        with pytest.raises(UnreadableError, match=rf"cannot read .*{name}: "):
            read_manifest(file.parent) if name == "manifest.json" else checkpoints.load(1)
        file.rmdir() if name == "manifest.json" else file.unlink()
        with pytest.raises(InputError, match=r"cannot read .*: No such file|no checkpoint") as missing:
            checkpoints.load(1)
        assert not isinstance(missing.value, UnreadableError)
        (tmp_path / name).rename(file)
    assert world.digests() == before
    assert checkpoints.load(1).extra == {"turn": 1}


def test_what_was_cut_off_is_cleared_away(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    checkpoints = checkpoints_of(world, folder)
    checkpoints.save(1, {"turn": 1})
    shutil.copytree(folder / "step-00000001", folder / "step-00000009.abcd.part")
    (folder / "notes.part").touch()  # not ours
    assert checkpoint_steps(folder) == [1]
    checkpoints.save(2, {"turn": 2})
    assert names(folder) == ["notes.part", "step-00000001", "step-00000002"]
    # killed between the two renames that replace step 2: the old one is still good, and comes back
    rename = Path.rename

    def dies(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {"turn": 3})
    assert "step-00000002.replaced" in names(folder)
    assert checkpoint_steps(folder) == [1, 2]
    assert checkpoints.load().extra == {"turn": 2}
    checkpoints.save(3, {"turn": 4})
    assert names(folder) == ["notes.part", "step-00000002", "step-00000003"]
    assert checkpoints.load(2).extra == {"turn": 2}


def test_a_checkpoint_of_something_else_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints_of(world, folder).save(1)
    small = MoESpec(hidden=HIDDEN, expert_ffn=6, num_experts=4, top_k=2, expert_bias=True, shared_ffn=4)
    cases: list[tuple[World, str]] = [
        (make_world(1, 1, spec=small), "has 24 experts in 3 MoE layers and 15 dense .* model 12 experts in 3"),
        (make_world(1, 1, num_layers=2), "model 16 experts in 2 MoE layers .* not in the model: dense.moe.2"),
        (make_world(1, 1, dtype=torch.float32), "gate_up is float64 .* must be float32"),
        (make_world(1, 1, masters=True), "lacks a master of experts.0.gate_up"),
    ]
    wide = MoESpec(hidden=HIDDEN, expert_ffn=7, num_experts=8, top_k=2, expert_bias=True, shared_ffn=4,
                   router=world.runtime.spec.router)  # fmt: skip
    cases.append((make_world(1, 1, spec=wide), r"experts.0.0.gate_up is float64 \[12, 8\] in it, and must be"))
    for other, words in cases:
        before = other.digests()
        with pytest.raises(InputError, match=words) as caught:
            checkpoints_of(other, folder).load()
        assert "step-00000001" in str(caught.value)
        assert other.digests() == before
        assert other.runtime.broken is None
    other = make_world(1, 1)
    parameters = list(other.model.parameters())
    for optimizer, words in (
        (torch.optim.SGD(parameters), "with AdamW, the optimizer is SGD"),
        (torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}]), r"\(1 of .* optimizer's \(2 of"),
        (torch.optim.AdamW(parameters[1:]), "in only one of them: dense.embed.weight"),
    ):
        with pytest.raises(InputError, match=words):
            Checkpoints(folder, other.runtime, other.model, optimizer).load()
    with pytest.raises(InputError, match="neither the module's"):
        Checkpoints(folder, other.runtime, other.model, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    # weights alone can be had
    Checkpoints(folder, other.runtime, other.model).load()
    weights = {name: value for name, value in world.digests().items() if name in other.digests()}
    assert other.digests() == weights
    Checkpoints(tmp_path / "weights", other.runtime, other.model).save(1)
    with pytest.raises(InputError, match="without an optimizer"):
        checkpoints_of(other, tmp_path / "weights").load()
    for extra in ({"x": object()}, {1: 2}, {"$tensor": "x"}):
        with pytest.raises(InputError, match="cannot save extra"):
            checkpoints_of(world, tmp_path / "odd").save(1, extra)  # type: ignore[arg-type]
    assert not (tmp_path / "odd").exists()


def test_damaged_files_are_named(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints = checkpoints_of(world, folder)
    checkpoints.save(1)
    before, at = world.digests(), folder / "step-00000001"
    shard, manifest = at / "__0_0.distcp", at / "manifest.json"
    whole = {path: path.read_bytes() for path in at.iterdir()}

    def refused(words: str) -> None:
        with pytest.raises(InputError, match=words):
            checkpoints.load()
        assert world.digests() == before
        for path, raw in whole.items():
            path.write_bytes(raw)

    shard.write_bytes(whole[shard][:-1])
    refused(r"__0_0.distcp is damaged: it has \d+ bytes instead of")
    for place in (0, 1234, len(whole[shard]) - 1):
        shard.write_bytes(whole[shard][:place] + bytes([whole[shard][place] ^ 8]) + whole[shard][place + 1 :])
        refused("__0_0.distcp is damaged: its SHA-256")
    shard.unlink()
    refused("cannot read .*__0_0.distcp: No such file")
    manifest.write_bytes(whole[manifest][:-9])
    refused("manifest.json is damaged: not valid JSON")
    manifest.write_bytes(b"[" * 100_000)
    refused("manifest.json is damaged: not valid JSON")
    manifest.write_text(whole[manifest].decode().replace('"step": 1,', '"step": 2,'))
    refused("manifest.json is damaged: its SHA-256")
    restamp(at, lambda body: body.update(version=99))
    refused("version 1")
    restamp(at, lambda body: body["tensors"].popitem())
    refused("is incomplete|another model")
    restamp(at, lambda body: body["values"].update(optimizer={}))
    refused("no values that can be used")
    restamp(at, lambda body: next(iter(body["tensors"].values())).update(first=10**9))
    refused("outside of")
    restamp(at, lambda body: next(iter(body["tensors"].values())).update(dtype="load"))
    refused("no type")
    assert checkpoints.load().step == 1


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_nothing_that_is_read_can_run_code(world: World, tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    checkpoints = checkpoints_of(world, folder)
    checkpoints.save(1)
    before, at = world.digests(), folder / "step-00000001"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # it would work
    mark.rmdir()
    # the index of DCP is a pickle: it is written for others, and never opened here
    index = (at / ".metadata").read_bytes()
    (at / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(InputError, match=r"\.metadata is damaged"):
        checkpoints.load()
    restamp(at)
    assert checkpoints.load().step == 1
    with pytest.warns(UserWarning, match="disabled"), suppress(Exception, CheckpointException):
        dcp.load({"dense.embed.weight": torch.empty(1)}, checkpoint_id=at, no_dist=True)
    assert mark.exists()  # a plain reader of DCP runs it
    mark.rmdir()
    (at / ".metadata").write_bytes(index)
    # a tensor's own pickle, of the right place and size
    shard = at / "__0_0.distcp"
    raw = shard.read_bytes()
    for evil in (_zip_of(Evil(mark)), pickle.dumps(Evil(mark), protocol=2)):

        def point_there(body: dict[str, Any], size: int = len(evil)) -> None:
            for tensor in body["tensors"].values():
                tensor.update(file="__0_0.distcp", first=0, num_bytes=size)

        shard.write_bytes(evil + raw[len(evil) :])
        restamp(at, point_there)
        with pytest.raises(InputError, match=r"cannot read .*step-00000001"):
            checkpoints.load()
        assert not mark.exists()
        assert world.runtime.broken  # it was found when some tensors may have been filled
        with pytest.raises(BrokenStateError, match="load again"):
            checkpoints.save(2)
    # names that lead out of the folder
    shard.write_bytes(raw)
    outside = tmp_path / "outside.distcp"
    outside.write_bytes(raw)

    def lead_out(body: dict[str, Any]) -> None:
        body["files"]["../../outside.distcp"] = body["files"].pop("__0_0.distcp")
        for tensor in body["tensors"].values():
            tensor["file"] = "../../outside.distcp"

    restamp(at, lead_out)
    with pytest.raises(InputError, match="not a file name"):
        checkpoints.load()
    shutil.rmtree(folder)
    with torch.no_grad():
        world.runtime.broken = None
    checkpoints.save(3)
    checkpoints.load()
    assert world.runtime.broken is None
    assert world.digests().keys() == before.keys()


def _zip_of(evil: Evil) -> bytes:
    """What torch.save would write, with another pickle inside."""
    raw, good = BytesIO(), BytesIO()
    torch.save(torch.ones(2), good)
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(raw, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle.dumps(evil, protocol=2) if name.endswith("data.pkl") else old.read(name))
    return raw.getvalue()


def test_others_can_read_it_with_dcp(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints_of(world, folder).save(1)
    weights = world.runtime.weights[2]
    state = {"experts.2.5.down": torch.empty(HIDDEN, 6, dtype=torch.float64),
             "dense.embed.weight": torch.empty(HIDDEN, HIDDEN, dtype=torch.float64)}  # fmt: skip
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=folder / "step-00000001", no_dist=True)
    assert torch.equal(state["experts.2.5.down"], weights.get_parameter("down")[5])
    assert torch.equal(state["dense.embed.weight"], world.model.embed.weight)


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, plain = checkpoints_of(world, tmp_path / "run"), checkpoints_of(world, tmp_path / "plain")
    plain.save(1, EXTRA)
    saved, go, write = world.digests(), Event(), checkpoint_files.write_shard

    def later(*arguments: Any) -> None:
        assert go.wait(30)
        write(*arguments)

    monkeypatch.setattr(module, "write_shard", later)
    extra = {**EXTRA, "list": [1, [2.5, None, True]]}
    saving = checkpoints.save(1, extra, asynchronous=True)
    extra["list"].append("changed")  # type: ignore[union-attr]
    world.train(2)  # goes on, and must not show
    assert not saving.done
    assert max(checkpoint_steps(tmp_path / "run"), default=None) is None
    go.set()
    saving.wait()
    assert saving.done
    assert world.digests() != saved
    shards = [folder / "step-00000001" / "__0_0.distcp" for folder in (tmp_path / "run", tmp_path / "plain")]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    assert same(checkpoints.load().extra, EXTRA)
    assert world.digests() == saved

    # a second save waits for the first, and so does load
    go.clear()
    checkpoints.save(2, asynchronous=True)
    go.set()
    checkpoints.save(3, asynchronous=True)
    assert checkpoints.load().step == 3
    checkpoints.close()

    # what goes wrong shows in wait, and in the next call if nobody waits
    def fails(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    failing = checkpoints_of(world, tmp_path / "run")
    failing.load()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "_write_tensors", fails)
        saving = failing.save(4, asynchronous=True)
        with pytest.raises(InputError, match="No space left"):
            saving.wait()
        with pytest.raises(InputError, match="No space left"):
            failing.save(5)
    assert checkpoint_steps(tmp_path / "run") == [2, 3]
    assert not list((tmp_path / "run").glob("*.part"))
    failing.save(5)
    assert checkpoint_steps(tmp_path / "run") == [3, 5]


def test_a_broken_state_is_not_saved_and_a_load_mends_it(world: World, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(world, tmp_path)
    checkpoints.save(1)
    saved = world.digests()
    with torch.no_grad():
        world.runtime.weights[0].parts()[0].zero_()
    world.runtime.broken = "a migration was cut off"
    with pytest.raises(BrokenStateError, match="cannot save a checkpoint: a migration was cut off"):
        checkpoints.save(2)
    with pytest.raises(BrokenStateError):
        world.model(torch.zeros(1, HIDDEN, dtype=torch.float64))
    checkpoints.load()
    assert world.digests() == saved
    assert world.runtime.broken is None
    world.train(1)
    assert max(checkpoint_steps(tmp_path), default=None) == 1
