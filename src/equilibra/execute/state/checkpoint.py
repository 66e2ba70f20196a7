"""Checkpoints: the whole state of a training run, saved under any placement and loaded under any other.

    checkpoints = Checkpoints(folder, runtime, module, optimizer)   # on all ranks
    checkpoints.save(step, {"seed": 7})                             # or asynchronous=True, and .wait() later
    loaded = checkpoints.load()                                     # the last one, on any ranks with any homes

Weights, masters and moments are stored per expert under logical numbers (see `checkpoint_state`), in the format of
torch.distributed.checkpoint (see `checkpoint_files`).

Promises. A checkpoint is complete or absent, whatever kills the run. A failure on one rank is an error on every rank.
Loading verifies every byte before it changes anything in memory. Reading never runs code from the file.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.atomic import flush_to_disk
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.execute.group import patient_group
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.checkpoint_files import (
    MANIFEST,
    Manifest,
    disk_errors,
    finish,
    read_manifest,
    read_tensors,
    verify,
    write_shard,
)
from equilibra.execute.state.checkpoint_state import Loading, Snapshot, Trained

# --- the folder of a run's checkpoints ---
# Only world rank 0 changes it. A kill at any moment leaves every complete checkpoint complete (see the names in
# `checkpoint_files`). A checkpoint newer than the one this run resumed from is set aside, never deleted.

COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")
MAX_STEP = 10**12


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, in order."""
    if not folder.is_dir():
        return []
    with disk_errors("read", folder):
        matches = [COMPLETE.fullmatch(path.name) for path in folder.iterdir() if (path / MANIFEST).is_file()]
    return sorted({int(match[1]) for match in matches if match})


def folder_of_step(folder: Path, step: int | None) -> Path:
    """Folder of a step's checkpoint; None: of the last one."""
    steps = checkpoint_steps(folder)
    if not steps:
        raise InputError(f"there is no checkpoint in {folder}{'' if folder.is_dir() else ': there is no such folder'}")
    if step is not None and step not in steps:
        raise InputError(f"there is no checkpoint of step {step} in {folder}: there are {', '.join(map(str, steps))}")
    chosen = _named(folder, steps[-1] if step is None else step)
    return chosen if (chosen / MANIFEST).is_file() else _replaced(chosen)


def begin_part(folder: Path, step: int, *, last: int | None) -> str:
    """Remove interrupted saves, and make a folder to write into; returns its name.

    last: the step this run loaded or saved here last; None: neither, so later steps belong to another run.
    """
    check_whole("step", step, low=0, high=MAX_STEP - 1)
    with disk_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("step-*.replaced"):
            new = path.with_suffix("")
            _remove(path) if (new / MANIFEST).is_file() else path.rename(new)
        for path in folder.glob("step-*.part"):
            shutil.rmtree(path, ignore_errors=True)
        later = [other for other in checkpoint_steps(folder) if other >= step]
        if later and last is None:
            raise InputError(
                f"cannot save step {step} in {folder}, which has step {later[-1]}: it is of another run; load it to go "
                "on from there, or use another folder"
            )
        part = folder / f"{_named(folder, step).name}.{secrets.token_hex(4)}.part"
        part.mkdir()
        return part.name


def commit(folder: Path, part: Path, step: int, *, keep: int, last: int | None) -> None:
    """Make a finished part its step's checkpoint, set later ones of an earlier attempt aside, then remove others."""
    final = _named(folder, step)
    with disk_errors("write", final):
        for other in checkpoint_steps(folder):
            if last is not None and other > last:
                _set_aside(folder_of_step(folder, other), _named(folder, other))
        if final.exists():
            final.rename(_replaced(final))
        part.rename(final)
        flush_to_disk(folder)
    steps = checkpoint_steps(folder)
    kept = [other for other in steps if other <= step][-keep:]
    with suppress(OSError):  # the checkpoint is there; what could not be removed is tried again by the next save
        _remove(_replaced(final))
        for other in set(steps) - set(kept):
            _remove(_named(folder, other))


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove a step's checkpoint atomically."""
    with disk_errors("write", folder):
        _remove(folder_of_step(folder, step))


def _set_aside(path: Path, named: Path) -> None:
    number = 1
    while (aside := named.with_name(f"{named.name}.aside{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    path.rename(aside)


def _named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _remove(path: Path) -> None:
    """Rename first, so that a half-removed checkpoint is never taken for a complete one."""
    if path.exists():
        going = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        path.rename(going)
        shutil.rmtree(going)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The step and the caller's values of a loaded checkpoint."""

    step: int
    extra: dict[str, Any]
    """values saved by world rank 0"""


@dataclass(frozen=True)
class Saving:
    """A checkpoint being written."""

    future: Future[None] | None = None
    """None: already written"""

    @property
    def done(self) -> bool:
        return self.future is None or self.future.done()

    def wait(self) -> None:
        """Wait until it is written; raises what went wrong."""
        if self.future is not None:
            self.future.result()


class Checkpoints:
    """Saves and loads the checkpoints of one run. All ranks call it together and share a file system."""

    def __init__(
        self, folder: str | Path, runtime: Runtime, module: nn.Module, optimizer: torch.optim.Optimizer | None = None,
        *, masters: Mapping[nn.Parameter, Tensor] | None = None, keep: int = 2, timeout_s: float = 1800.0,
    ) -> None:  # fmt: skip
        """masters: float32 master of each parameter, if there are any; timeout_s: how long ranks wait for disks."""
        check_whole("keep", keep, low=1, high=None)  # the last checkpoint always stays
        self.folder, self.keep = Path(folder), keep
        self.trained = Trained(runtime=runtime, module=module, optimizer=optimizer, masters=masters or {})
        self.runtime = runtime
        self._ranks = patient_group(runtime.group, timeout_s=timeout_s, what="connecting for checkpoints")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equilibra-checkpoint")
        self._pending = Saving()
        self._last: int | None = None
        """the step this run loaded or saved last in the folder"""

    def save(self, step: int, extra: Mapping[str, Any] | None = None, *, asynchronous: bool = False) -> Saving:
        """Collective: write a checkpoint, then remove all but the last `keep`.

        Checkpoints newer than the loaded one are set aside as step-*.aside. Non-finite weights or optimizer state raise
        NonFiniteError before anything is written or removed.

        extra: values of world rank 0: numbers, strings, tensors, and lists and dicts of them.
        asynchronous: return once the state is copied to host memory; `wait` or the next call raises a failure.
        """
        self.wait()
        self.runtime.check_whole("save a checkpoint")

        def take() -> Snapshot:
            self.trained.check_finite()
            snapshot = Snapshot(self.trained, extra or {})
            if asynchronous:
                snapshot.copy()
            return snapshot

        snapshot = self._ranks.all_succeed(take, what=f"taking the state of step {step}")
        self._ranks.agree(snapshot.description(), what="where experts are and what the optimizer keeps of them")
        if not asynchronous:
            self._write(step, snapshot)
            return Saving()
        self._pending = Saving(self._thread.submit(self._write, step, snapshot))
        return self._pending

    def _write(self, step: int, snapshot: Snapshot) -> None:
        """Collective, on connections of its own: it may run beside training."""
        ranks, rank = self._ranks, self._ranks.world_rank

        def begin() -> str:
            return begin_part(self.folder, step, last=self._last) if rank == 0 else ""

        def end() -> None:
            if rank == 0:
                finish(part, step=step, world_size=ranks.world_size, values=snapshot.values)
                commit(self.folder, part, step, keep=self.keep, last=self._last)

        what = f"writing the checkpoint of step {step}"
        part = self.folder / ranks.gather_text(ranks.all_succeed(begin, what=what), what=what)[0]
        try:
            ranks.all_succeed(lambda: write_shard(part, snapshot.tensors, rank), what=what)
            ranks.all_succeed(end, what=what)
        except BaseException:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise
        self._last = step

    def load(self, step: int | None = None) -> Loaded:
        """Collective: load model and optimizer from a step's checkpoint; None: from the last one."""
        self.wait()
        ranks, runtime = self._ranks, self.runtime

        def look() -> tuple[Path, Manifest]:
            folder = folder_of_step(self.folder, step)
            return folder, read_manifest(folder)

        folder, manifest = ranks.all_succeed(look, what=f"looking for a checkpoint in {self.folder}")
        what = f"loading {folder}"
        ranks.agree(f"step {manifest.step}, {manifest.digest}", what="the checkpoint to load")
        ranks.all_succeed(
            lambda: verify(folder, manifest, rank=ranks.world_rank, world_size=ranks.world_size), what=what
        )
        loading = ranks.all_succeed(lambda: _loading(self.trained, folder, manifest), what=what)
        runtime.disarm()

        def fill() -> None:
            read_tensors(folder, manifest, loading.tensors)
            loading.install()

        try:
            ranks.all_succeed(fill, what=what)
        except BaseException as error:
            runtime.broken = f"{what} was cut off ({type(error).__name__}): the state in memory is mixed; load again"
            raise
        runtime.broken = None
        runtime.weights_changed()
        self._last = manifest.step
        return Loaded(step=manifest.step, extra=loading.extra)

    def wait(self) -> None:
        """Wait for an asynchronous save; raises what went wrong."""
        pending, self._pending = self._pending, Saving()
        pending.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=True)


def _loading(trained: Trained, folder: Path, manifest: Manifest) -> Loading:
    try:
        return Loading(trained, manifest)
    except InputError as error:
        raise InputError(f"cannot load {folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot load {folder}: its manifest has no values that can be used ({error!r})") from error
