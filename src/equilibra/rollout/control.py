"""Messages from an engine to its workers, and how weights reach them: piece by piece through shared memory.

Every worker sees all names and copies what it holds: attention processes dense tensors, expert processes their
experts. No process holds more than its part and the piece in transit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from equilibra.rollout.memory import Memory, Where

ALIGNMENT = 64
PIECE = 16 << 20
"""bytes of weights in transit, unless one tensor is larger"""
NAP_S = 0.05
"""longest sleep of a worker before it looks for messages itself"""


class Ask(Enum):
    """First part of a message to a worker; it determines the second."""

    CONNECT = auto()
    """handles of all workers' memory; answer: None"""
    INSTANCES = auto()
    """Instances; expert processes answer with the copies that are new to them"""
    LOAD_BEGIN = auto()
    """version; no answer"""
    LOAD = auto()
    """(Where, parcels); answer: Took"""
    LOAD_END = auto()
    """None; answer: missing names"""
    EXPORT = auto()
    """(Where, [(layer, expert)]): write them there one after another; answer: their offsets"""
    IMPORT = auto()
    """(Where, [((layer, expert), offset)]): read them from there; answer: None"""
    GENERATE = auto()
    """(temperature, [(number, Request)]): attention processes answer (number, Generation) one by one"""
    STATISTICS = auto()
    """None; attention processes answer with Statistics since the last time"""


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
    """Destination of a published tensor."""

    view: Tensor
    """its values in the file's order; axes may be split"""
    shape: tuple[int, ...]
    """in the file, without the axis of experts if they are stacked"""
    row: int | None = None
    """expert of a stacked tensor"""


class Loader:
    """A worker's side of loading weights."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._where: Where | None = None
        self._targets: Mapping[str, list[Target]] = {}
        self._missing: set[str] = set()

    def begin(self, targets: Mapping[str, list[Target]]) -> None:
        self._targets, self._missing = targets, set(targets)

    def take(self, where: Where, sent: Iterable[Parcel]) -> Took:
        """Copy the tensors that this worker holds."""
        if self._memory is None or self._where != where:
            self._memory, self._where = Memory.open(where), where
        taken = set[str]()
        for parcel in sent:
            for target in self._targets.get(parcel.name, ()):
                stacked = target.row is not None
                if (parcel.shape[1:] if stacked else parcel.shape) != target.shape:
                    wanted = f"{list(target.shape)}{' per expert' if stacked else ''}"
                    return Took(
                        taken, f"{parcel.name} came with shape {list(parcel.shape)}, but the engine has {wanted}"
                    )
                value = self._memory.tensor(parcel.at, parcel.shape, parcel.dtype)
                target.view.copy_((value[target.row] if stacked else value).view(target.view.shape))
                taken.add(parcel.name)
        self._missing -= taken
        return Took(taken, "")

    def end(self) -> list[str]:
        """Release the memory in transit; returns the names that are missing."""
        self._memory = self._where = None
        return sorted(self._missing)


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


def export_rows(where: Where, rows: Iterable[Tensor]) -> list[int]:
    """Write rows into shared memory; returns their offsets."""
    memory, at, offsets = Memory.open(where), 0, []
    for row in rows:
        memory.tensor(at, tuple(row.shape), row.dtype).copy_(row)
        offsets.append(at)
        at = _aligned(at + row.nbytes)
    return offsets


def import_rows(where: Where, rows: Iterable[tuple[int, Tensor]]) -> None:
    """Read rows from their offsets in shared memory."""
    memory = Memory.open(where)
    for at, row in rows:
        row.copy_(memory.tensor(at, tuple(row.shape), row.dtype))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def apply_setting(device: torch.device, threads: int) -> None:
    """Configure torch in a worker."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
