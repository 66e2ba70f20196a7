"""Checkpoints: the whole state of a training run, saved under any placement and loaded under any other.

    checkpoints = Checkpoints(folder, runtime, module, optimizer)   # on all ranks
    checkpoints.save(step, {"seed": 7})                             # or asynchronous=True, and .wait() later
    loaded = checkpoints.load()                                     # the last one, on any ranks with any homes

Weights, masters and moments are told expert by expert, with logical numbers (see `checkpoint_state`), in the format of
torch.distributed.checkpoint (see `checkpoint_files`).

Promises. A checkpoint is there completely or not at all, whatever kills the run. A failure on one rank is an error on
every rank. Loading verifies every byte before it changes anything in memory. Nothing that is read can run code.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.checks import check_whole
from equilibra.core.errors import BrokenStateError, InputError
from equilibra.execute.group import patient_group
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.checkpoint_files import Manifest, finish, read_manifest, read_tensors, verify, write_shard
from equilibra.execute.state.checkpoint_folder import begin_part, commit, folder_of_step, latest_checkpoint
from equilibra.execute.state.checkpoint_load import Loading
from equilibra.execute.state.checkpoint_state import Snapshot, Trained

__all__ = ["Checkpoints", "Loaded", "Saving", "latest_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What came with the state."""

    step: int
    """as it was saved"""
    extra: dict[str, Any]
    """what the caller saved on world rank 0"""


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk."""

    future: Future[None] | None = None
    """None: it is there"""

    @property
    def done(self) -> bool:
        """Whether it is there, or has failed."""
        return self.future is None or self.future.done()

    def wait(self) -> None:
        """Until it is there; raises what went wrong."""
        if self.future is not None:
            self.future.result()


class Checkpoints:
    """The checkpoints of one run. All ranks make it and call its methods together; they share the file system."""

    def __init__(
        self, folder: str | Path, runtime: Runtime, module: nn.Module, optimizer: torch.optim.Optimizer | None = None,
        *, masters: Mapping[nn.Parameter, Tensor] | None = None, keep: int = 2, timeout_s: float = 1800.0,
    ) -> None:  # fmt: skip
        """Remember what is saved.

        masters: for each parameter its copy in more digits, where the optimizer works on such copies.
        timeout_s: how long ranks wait for each other's disks.
        """
        check_whole("keep", keep, low=1, high=None)  # the last checkpoint always stays
        self.folder, self.keep = Path(folder), keep
        self.trained = Trained(runtime=runtime, module=module, optimizer=optimizer, masters=masters or {})
        self.runtime = runtime
        self._ranks = patient_group(runtime.group, timeout_s=timeout_s, what="connecting for checkpoints")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equilibra-checkpoint")
        self._pending = Saving()
        self._last: int | None = None
        """the step that this run loaded or saved last in the folder"""

    def save(self, step: int, extra: Mapping[str, Any] | None = None, *, asynchronous: bool = False) -> Saving:
        """Collective: write a checkpoint, then remove all but the last `keep`.

        Later ones than the one that was loaded are set aside as step-*.aside, not removed.

        extra: the caller's values, of world rank 0: numbers, strings, tensors, and lists and dicts of them.
        Weights or optimizer state that are not finite are an error, and nothing is written or removed.
        asynchronous: return when the state is copied; training may go on. A failure shows in `wait` or the next call.
        """
        self.wait()
        if self.runtime.broken is not None:
            raise BrokenStateError(f"cannot save a checkpoint: {self.runtime.broken}")
        taken: list[Snapshot] = []

        def take() -> None:
            self.trained.check_finite()
            taken.append(Snapshot(self.trained, extra or {}))
            if asynchronous:
                taken[0].copy()

        self._ranks.all_succeed(take, what=f"taking the state of step {step}")
        self._ranks.agree(taken[0].description(), what="where experts are and what the optimizer keeps of them")
        if not asynchronous:
            self._write(step, taken[0])
            return Saving()
        self._pending = Saving(self._thread.submit(self._write, step, taken[0]))
        return self._pending

    def _write(self, step: int, snapshot: Snapshot) -> None:
        """Collective, on the connections of checkpoints alone: it may run beside training."""
        ranks, rank = self._ranks, self._ranks.world_rank
        name = [""]

        def begin() -> None:
            if rank == 0:
                name[0] = begin_part(self.folder, step, last=self._last)

        def end() -> None:
            if rank == 0:
                finish(part, step=step, world_size=ranks.world_size, values=snapshot.values)
                commit(self.folder, part, step, keep=self.keep, last=self._last)

        what = f"writing the checkpoint of step {step}"
        ranks.all_succeed(begin, what=what)
        said = ranks.gather(np.frombuffer(name[0].encode(), np.uint8), what=what)
        part = self.folder / said[0].tobytes().decode()
        try:
            ranks.all_succeed(lambda: write_shard(part, snapshot.tensors, rank), what=what)
            ranks.all_succeed(end, what=what)
        except BaseException:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise
        self._last = step

    def load(self, step: int | None = None) -> Loaded:
        """Collective: fill model and optimizer from the checkpoint of a step; None: from the last one."""
        self.wait()
        ranks, runtime = self._ranks, self.runtime
        found: list[tuple[Path, Manifest]] = []
        loading: list[Loading] = []

        def look() -> None:
            folder = folder_of_step(self.folder, step)
            found.append((folder, read_manifest(folder)))

        ranks.all_succeed(look, what=f"looking for a checkpoint in {self.folder}")
        (folder, manifest), what = found[0], f"loading {found[0][0]}"
        ranks.agree(f"step {manifest.step}, {manifest.digest}", what="the checkpoint to load")
        ranks.all_succeed(
            lambda: verify(folder, manifest, rank=ranks.world_rank, world_size=ranks.world_size), what=what
        )
        ranks.all_succeed(lambda: loading.append(_loading(self.trained, folder, manifest)), what=what)
        runtime.disarm()

        def fill() -> None:
            read_tensors(folder, manifest, loading[0].tensors)
            loading[0].install()

        try:
            ranks.all_succeed(fill, what=what)
        except BaseException as error:
            runtime.broken = f"{what} was cut off ({type(error).__name__}): the state in memory is mixed; load again"
            raise
        runtime.broken = None
        runtime.weights_changed()
        self._last = manifest.step
        return Loaded(step=manifest.step, extra=loading[0].extra)

    def wait(self) -> None:
        """Until an asynchronous save is done; raises what went wrong with it."""
        pending, self._pending = self._pending, Saving()
        pending.wait()

    def close(self) -> None:
        """Wait, and stop the thread."""
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
