"""The host path without GPUs: flash copies through one shared memory segment per node.

Symbols: n published instances, S spare slots per rank, R ranks of the node, P values of one expert in flat form.

    segment:  version [n] int64 | weights [n, P] | gradients [2, R, S, P]

After weights change, every rank writes the instances that the plan copies, then their version. A fetch is a one-sided
read in a thread. Gradients are written where the origin reads them; an all-reduce over the node says that all have
written. With two banks, a rank overwrites list k by k + 2 only after all ranks have finished k (before sending k + 1).
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import RankLostError, StaleError
from equilibra.core.visit import CopyList
from equilibra.execute.copies.segment import PAGE, map_of_node, pages, view_of
from equilibra.execute.copies.transfer import Copied, TransferEngine
from equilibra.execute.group import Channel, ExpertGroup, Pending, Ready, Then


class HostEngine(TransferEngine):
    """Copies through one segment per node."""

    def __init__(self, group: ExpertGroup, *, num_slots: int, row: Tensor, gradient_dtype: torch.dtype) -> None:
        self.group, self.row = group, row
        self.num_slots, self.gradient_dtype = num_slots, gradient_dtype
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="equilibra-host-path")
        self._segment: _Segment | None = None
        self._copied: Copied | None = None
        self._list = 0
        """number of gradient lists returned so far"""

    @property
    def num_bytes(self) -> int:
        return 0 if self._segment is None else self._segment.num_bytes

    def publish(self, version: int, copied: Copied) -> None:
        if self._segment is None or self._segment.num_entries < copied.most_of_a_node:
            shape = _Shape(
                num_entries=copied.most_of_a_node, num_ranks=self.group.cluster.ranks_per_node,
                num_slots=self.num_slots, values=self.row.numel(), dtype=self.row.dtype,
                gradient_dtype=self.gradient_dtype,
            )  # fmt: skip
            self._segment = _Segment(shape, map_of_node(self.group, shape.num_bytes))
        segment, mine = self._segment, np.flatnonzero(copied.origin == self.group.rank)
        self.group.barrier(what="waiting for readers of the last version on the host path")
        for entry in mine.tolist():
            segment.versions[entry] = -1
            self.source.write_flat(int(copied.layer[entry]), int(copied.expert[entry]), segment.weights_nP[entry])
            segment.versions[entry] = version
        self._copied = copied
        self.group.barrier(what="publishing weights on the host path")

    def fetch(self, copies: CopyList, version: int, slots_nP: Tensor) -> Pending:
        if copies.held_expert.size == 0:
            return Ready()
        if self._segment is None or self._copied is None:
            raise StaleError("cannot fetch copies over the host path: no weights are published yet")
        reading = self._reader.submit(self._segment.read, self._copied.entries(copies), version, slots_nP)
        return _Read(reading, self.group.timeout_s)

    def gradient_slots(self, copies: CopyList) -> Tensor:
        if self._segment is None:
            return self.row.new_zeros(0, self.row.numel(), dtype=self.gradient_dtype)
        mine = self._segment.gradients_2RSP[self._list % 2, self.group.rank - self.group.first_of_node]
        return mine[: copies.held_expert.size]

    def give_back(self, copies: CopyList) -> Pending:
        """Announce that this rank has written; `wait` adds what others wrote."""
        if copies.num_in_node == 0 or self._segment is None:
            return Ready()
        bank, self._list = self._segment.gradients_2RSP[self._list % 2], self._list + 1
        what = f"returning gradients of flash copies of MoE layer {copies.layer}"
        said = self.group.sum(Channel.GRADIENTS, torch.zeros(1, device=self.row.device), what=what)
        return Then(said, partial(self._add, copies, bank))

    def _add(self, copies: CopyList, bank_RSP: Tensor) -> None:
        for expert, target, slot in zip(
            copies.served_expert.tolist(), copies.served_target.tolist(), copies.served_slot.tolist(), strict=True
        ):
            self.source.add_gradient(copies.layer, expert, bank_RSP[target - copies.first_rank, slot])

    def close(self) -> None:
        """Stop the reader; the memory is freed with the last rank that maps it."""
        self._reader.shutdown(wait=True)
        self._segment = None


@dataclass(frozen=True, kw_only=True)
class _Shape:
    num_entries: int
    num_ranks: int
    num_slots: int
    values: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    @property
    def weights_at(self) -> int:
        return pages(8 * self.num_entries)

    @property
    def gradients_at(self) -> int:
        return self.weights_at + pages(self.num_entries * self.values * self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        rows = 2 * self.num_ranks * self.num_slots
        return max(self.gradients_at + pages(rows * self.values * self.gradient_dtype.itemsize), PAGE)


class _Segment:
    def __init__(self, shape: _Shape, memory: mmap.mmap) -> None:
        self.num_entries, self.num_bytes = shape.num_entries, shape.num_bytes
        self.versions = np.frombuffer(memory, np.int64, count=shape.num_entries)
        self.weights_nP = view_of(memory, shape.weights_at, (shape.num_entries, shape.values), shape.dtype)
        gradients = (2, shape.num_ranks, shape.num_slots, shape.values)
        self.gradients_2RSP = view_of(memory, shape.gradients_at, gradients, shape.gradient_dtype)

    def read(self, entries: list[int], version: int, slots_nP: Tensor) -> None:
        """Copy published weights into slots; StaleError if they have another version."""
        for slot, entry in enumerate(entries):
            slots_nP[slot].copy_(self.weights_nP[entry])
            found = int(self.versions[entry])
            if found != version:
                raise StaleError(f"the host path holds weights of version {found}, not {version}")


@dataclass(frozen=True)
class _Read:
    future: Future[None]
    timeout_s: float

    def wait(self) -> None:
        try:
            self.future.result(self.timeout_s)
        except TimeoutError as error:
            raise RankLostError(f"reading shared memory took longer than the timeout of {self.timeout_s} s") from error
