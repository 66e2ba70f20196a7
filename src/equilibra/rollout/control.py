"""What an engine asks of its workers, and how weights reach them: through a piece of shared memory, name by name.

Every worker sees all names and copies what it has room for: attention processes dense tensors, expert processes their
experts. Nobody holds more than its part and the piece in transit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from equilibra.rollout.memory import Memory, Where

__all__ = ["Ask", "Loader", "Parcel", "Target", "Took", "apply_setting", "parcels"]

ALIGNMENT = 64
PIECE = 16 << 20
"""bytes of weights in transit, unless one tensor is larger"""


class Ask(Enum):
    """First part of a message to a worker; the second depends on it."""

    CONNECT = auto()
    """handles of all workers' memory; answer: None"""
    INSTANCES = auto()
    """Instances; expert processes answer which copies are new to them"""
    LOAD_BEGIN = auto()
    """version; no answer"""
    LOAD = auto()
    """(Where, parcels); answer: Took"""
    LOAD_END = auto()
    """None; answer: names that are missing"""
    EXPORT = auto()
    """(Where, [(layer, expert)]): put them there one after another; answer: their offsets"""
    IMPORT = auto()
    """(Where, [((layer, expert), offset)]): take them from there; answer: None"""
    GENERATE = auto()
    """(temperature, [(number, Request)]): answers come as (number, Generation) one by one; to attention processes"""
    STATISTICS = auto()
    """None; answer: Statistics since the last time; to attention processes"""


class Parcel(NamedTuple):
    """A tensor in transit."""

    name: str
    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Took(NamedTuple):
    """A worker's answer to parcels."""

    names: set[str]
    refused: str
    """why one does not fit; empty: all do"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """Where a published tensor goes."""

    view: Tensor
    """with values in the file's order; axes may not be merged yet"""
    shape: tuple[int, ...]
    """in the file, without the axis of experts if they are stacked"""
    row: int | None = None
    """expert of a stacked tensor"""


class Loader:
    """A worker's side."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._where: Where | None = None
        self._targets: Mapping[str, list[Target]] = {}
        self._missing: set[str] = set()

    def begin(self, targets: Mapping[str, list[Target]]) -> None:
        self._targets, self._missing = targets, set(targets)

    def take(self, where: Where, sent: Iterable[Parcel]) -> Took:
        """Copy what is wanted."""
        memory, taken = self._opened(where), set[str]()
        for parcel in sent:
            for target in self._targets.get(parcel.name, ()):
                shape = parcel.shape if target.row is None else parcel.shape[1:]
                if shape != target.shape:
                    wanted = f"{list(target.shape)}{' per expert' if target.row is not None else ''}"
                    return Took(
                        taken, f"{parcel.name} came with shape {list(parcel.shape)}, but the engine has {wanted}"
                    )
                value = memory.tensor(parcel.at, parcel.shape, parcel.dtype)
                target.view.copy_((value if target.row is None else value[target.row]).view(target.view.shape))
                taken.add(parcel.name)
                self._missing.discard(parcel.name)
        return Took(taken, "")

    def end(self) -> list[str]:
        """Let go of the memory in transit; returns the names that have not come."""
        self.release()
        return sorted(self._missing)

    def release(self) -> None:
        self._memory = self._where = None

    def export(self, where: Where, rows: Iterable[Tensor]) -> list[int]:
        memory, at, offsets = self._opened(where), 0, []
        for row in rows:
            memory.tensor(at, tuple(row.shape), row.dtype).copy_(row)
            offsets.append(at)
            at = _aligned(at + row.nbytes)
        return offsets

    def copy_in(self, where: Where, rows: Iterable[tuple[int, Tensor]]) -> None:
        memory = self._opened(where)
        for at, row in rows:
            row.copy_(memory.tensor(at, tuple(row.shape), row.dtype))

    def _opened(self, where: Where) -> Memory:
        if self._memory is None or self._where != where:
            self._memory, self._where = Memory.open(where), where
        return self._memory


def parcels(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[Where, list[Parcel]]]:
    """Put a stream of weights into shared memory, piece by piece; each is overwritten once the next is asked for."""
    memory, at, filled = Memory.create(PIECE), 0, list[Parcel]()
    for name, value in weights:
        if at + value.nbytes > memory.num_bytes:
            if filled:
                yield memory.where, filled
            at, filled = 0, []
            if value.nbytes > memory.num_bytes:
                memory = Memory.create(value.nbytes)
        memory.tensor(at, tuple(value.shape), value.dtype).copy_(value)
        filled.append(Parcel(name, at, tuple(value.shape), value.dtype))
        at = _aligned(at + value.nbytes)
    if filled:
        yield memory.where, filled


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def apply_setting(device: torch.device, threads: int) -> None:
    """What every worker sets first."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
