"""The host path: flash copies through one memory segment per node that every rank of the node reads and writes.

Symbols: n published instances, S spare slots per rank, R ranks of the node, P values of one expert in flat form.

    segment:  version [n] int64 | weights [n, P] | gradients [2, R, S, P]

After the weights changed, every rank writes those of its instances that the plan copies, once, and their version behind
them. A fetch is then one read that nobody else takes part in, in a thread of its own. Gradients are written where the
origin reads them; a sum of nothing over the node says that all have written. There are two banks of gradients: a rank
writes list k + 2 over list k only after all ranks have finished k (they do before they send k + 1).
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
from equilibra.execute.copies.transfer import Copied, ExpertSource
from equilibra.execute.group import Channel, ExpertGroup, Pending, Ready

__all__ = ["HostEngine"]


class HostEngine:
    """One segment per node."""

    def __init__(self, group: ExpertGroup, *, num_slots: int, row: Tensor, gradient_dtype: torch.dtype) -> None:
        self.group, self.row = group, row
        self.num_slots, self.gradient_dtype = num_slots, gradient_dtype
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="equilibra-host-path")
        self._segment: _Segment | None = None
        self._copied: Copied | None = None
        self._list = 0
        """lists of gradients returned so far"""

    @property
    def num_bytes(self) -> int:
        """The segment."""
        return 0 if self._segment is None else self._segment.num_bytes

    def serve(self, source: ExpertSource) -> None:
        """Copies are made of these instances from now on."""
        self.source = source

    def publish(self, version: int, copied: Copied) -> None:
        """Write this rank's instances, in a segment that is large enough."""
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
        """Read in a thread; nobody else takes part."""
        if copies.held_expert.size == 0:
            return Ready()
        if self._segment is None or self._copied is None:
            raise StaleError("the host path was asked for copies before any weights were published")
        entries = [
            self._copied.entry_of(copies.layer, expert, origin)
            for expert, origin in zip(copies.held_expert.tolist(), copies.held_origin.tolist(), strict=True)
        ]
        return _Read(self._reader.submit(self._segment.read, entries, version, slots_nP), self.group.timeout_s)

    def gradient_slots(self, copies: CopyList) -> Tensor:
        """Where the origins will read them."""
        if self._segment is None:
            return self.row.new_zeros(0, self.row.numel(), dtype=self.gradient_dtype)
        mine = self._segment.gradients_2RSP[self._list % 2, self.group.rank - self.group.first_of_node]
        return mine[: copies.held_expert.size]

    def give_back(self, copies: CopyList) -> Pending:
        """Say that this rank has written; when all have, add what others wrote."""
        if copies.num_in_node == 0 or self._segment is None:
            return Ready()
        bank, self._list = self._segment.gradients_2RSP[self._list % 2], self._list + 1
        said = self.group.sum(
            Channel.GRADIENTS,
            torch.zeros(1, device=self.row.device),
            what=f"returning gradients of flash copies of MoE layer {copies.layer}",
        )
        return _Returned(said, partial(self._add, copies, bank))

    def _add(self, copies: CopyList, bank_RSP: Tensor) -> None:
        for expert, target, slot in zip(
            copies.served_expert.tolist(), copies.served_target.tolist(), copies.served_slot.tolist(), strict=True
        ):
            self.source.add_gradient(copies.layer, expert, bank_RSP[target - copies.first_rank, slot])

    def finish_sums(self) -> None:
        """They are added when they are waited for."""

    def finish_reads(self) -> None:
        """Reads are of the segment: weights may change meanwhile."""

    def close(self) -> None:
        """Stop the reader; the memory goes with the last rank that has it open."""
        self._reader.shutdown(wait=True)
        self._segment = None


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What a segment holds."""

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
    """Views of the shared memory."""

    def __init__(self, shape: _Shape, memory: mmap.mmap) -> None:
        self.num_entries, self.num_bytes = shape.num_entries, shape.num_bytes
        self.versions = np.frombuffer(memory, np.int64, count=shape.num_entries)
        self.weights_nP = view_of(memory, shape.weights_at, (shape.num_entries, shape.values), shape.dtype)
        gradients = (2, shape.num_ranks, shape.num_slots, shape.values)
        self.gradients_2RSP = view_of(memory, shape.gradients_at, gradients, shape.gradient_dtype)

    def read(self, entries: list[int], version: int, slots_nP: Tensor) -> None:
        """Copy published weights into slots; an error if they are of another version."""
        for slot, entry in enumerate(entries):
            slots_nP[slot].copy_(self.weights_nP[entry])
            found = int(self.versions[entry])
            if found != version:
                raise StaleError(f"the host path holds weights of version {found}, version {version} was asked for")


@dataclass(frozen=True)
class _Read:
    """A read in the thread."""

    future: Future[None]
    timeout_s: float

    def wait(self) -> None:
        try:
            self.future.result(self.timeout_s)
        except TimeoutError as error:
            raise RankLostError(f"reading shared memory took more than {self.timeout_s} s") from error


@dataclass(frozen=True)
class _Returned:
    """Gradients that all ranks have written."""

    said: Pending
    add: partial[None]

    def wait(self) -> None:
        self.said.wait()
        self.add()
