"""Spare slots for flash copies, the protocol of the engines that fill them, and the engines that need no GPU.

Symbols: n copies that this rank holds, P values of one expert in flat form, R ranks of the node.

All ranks of a node make the same calls in the same order, even those that neither send nor receive; a call is skipped
only where the whole node has nothing to move, which every rank knows from the plan.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import BudgetError, RankLostError, StaleError
from equilibra.core.plan import Stage, StepPlan
from equilibra.core.visit import CopyList, VisitKey
from equilibra.execute.copies.segment import PAGE, map_of_node, pages, view_of
from equilibra.execute.copies.standing import StandingStore
from equilibra.execute.group import Channel, ExpertGroup, Pending, Ready, Then
from equilibra.execute.record import Moment, Span


@dataclass(kw_only=True)
class _Bank:
    rows_SP: Tensor
    key: VisitKey | None = None
    arriving: Pending | None = None
    started: Moment | None = None


class SpareSlots:
    """One buffer per rank for the flash copies of all layers: `depth + 1` banks, least recently used first.

    One bank serves the layer that computes, the others receive prefetches. A bank keeps its copies until it is reused,
    so a layer visited twice in a row fetches once. The choice depends only on the order of calls, which is the same on
    all ranks of a node.
    """

    def __init__(self, *, num_slots: int, depth: int, row: Tensor, now: Callable[[], Moment]) -> None:
        self.num_slots, self._now = num_slots, now
        self._banks = [
            _Bank(rows_SP=torch.zeros(num_slots, row.numel(), dtype=row.dtype, device=row.device))
            for _ in range(depth + 1)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(bank.rows_SP.nbytes for bank in self._banks)

    def has(self, key: VisitKey) -> bool:
        """Whether a visit's copies are here or on their way."""
        return any(bank.key == key for bank in self._banks)

    def start(self, key: VisitKey, copies: CopyList, engine: TransferEngine, version: int) -> None:
        """Fetch copies into the least recently used bank, unless a bank holds them."""
        if copies.num_in_node == 0 or self.has(key):
            return
        count = copies.held_expert.size
        if count > self.num_slots:
            raise BudgetError(
                f"the plan puts {count} flash copies on a rank with {self.num_slots} spare slots: raise spare_slots"
            )
        bank = self._banks.pop(0)
        if bank.arriving is not None:
            bank.arriving.wait()  # a prefetch nobody needed
        bank.key, bank.started = key, self._now()
        bank.arriving = engine.fetch(copies, version, bank.rows_SP[:count])
        self._banks.append(bank)

    def take(self, key: VisitKey, copies: CopyList, engine: TransferEngine, version: int) -> tuple[Tensor, Span | None]:
        """[n, P] copies, once they are here, and the span from request to arrival (None if they were taken before)."""
        if copies.num_in_node == 0:
            return self._banks[0].rows_SP[:0], None
        self.start(key, copies, engine, version)
        at = next(i for i, bank in enumerate(self._banks) if bank.key == key)
        bank = self._banks.pop(at)
        self._banks.append(bank)  # now the last to be overwritten
        started, bank.started = bank.started, None
        arriving, bank.arriving = bank.arriving, None
        if arriving is not None:
            arriving.wait()
        span = None if started is None else getattr(arriving, "span", (started, self._now()))
        return bank.rows_SP[: copies.held_expert.size], span

    def forget(self) -> None:
        """Drop all copies, because the weights have changed."""
        for bank in self._banks:
            if bank.arriving is not None:
                bank.arriving.wait()
            bank.key, bank.arriving, bank.started = None, None, None


class Path(StrEnum):
    """How flash copies travel inside a node."""

    COLLECTIVE = "collective"
    """all-to-all; works everywhere"""
    HOST = "host"
    """shared host memory; nobody waits for the home rank"""
    IPC = "ipc"
    """copy engines pull from the other GPU's memory"""
    BOTH = "both"
    """ipc for most of a copy, host for the rest, at the same time"""
    AUTO = "auto"
    """by plan and stage: ipc, or both where ipc alone would be late; host or collective where GPUs cannot open each
    other's memory; collective without GPUs, or where CUDA_DEVICE_MAX_CONNECTIONS=1"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Copied:
    """The instances in this rank's node that a plan copies, by layer and expert."""

    layer: NDArray[np.int32]
    """[n]"""
    expert: NDArray[np.int32]
    """[n]"""
    origin: NDArray[np.int32]
    """[n] rank that holds the instance"""
    most_of_a_node: int
    """largest n of any node; buffers have the same size everywhere"""
    most_served: int
    """most copies made of one rank's instances for one layer and micro-batch"""

    def entries(self, copies: CopyList) -> list[int]:
        """Entries of the copies this rank holds, in the order of slots."""
        of_layer = self.layer == copies.layer
        held = zip(copies.held_expert.tolist(), copies.held_origin.tolist(), strict=True)
        return [int(np.flatnonzero(of_layer & (self.expert == e) & (self.origin == r))[0]) for e, r in held]


def copied_of(plan: StepPlan, stages: Iterable[Stage], group: ExpertGroup) -> Copied:
    """The instances that these stages of a plan copy."""
    per_node, found, most_served = group.cluster.ranks_per_node, [np.zeros((4, 0), np.int64)], 0
    for stage in stages:
        part = plan.stages[stage]
        layer = part.problem_of_copy() // plan.num_micro_batches
        most_served = max(most_served, int(part.on_links()[1].max()))
        found.append(np.stack([part.origin // per_node, layer, part.expert, part.origin]).astype(np.int64))
    every = np.unique(np.concatenate(found, axis=1), axis=1)
    mine = every[1:, every[0] == group.node].astype(np.int32)
    most = int(np.bincount(every[0]).max()) if every.size else 0
    return Copied(layer=mine[0], expert=mine[1], origin=mine[2], most_of_a_node=most, most_served=most_served)


class TransferEngine(ABC):
    """One path of flash copies. It only ever hands out the version of the weights that is asked for."""

    source: StandingStore
    """the homes and standing copies on this rank, which flash copies are made of"""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory beside the slots: gradients, and memory that ranks of a node share (counted on each)."""

    @abstractmethod
    def publish(self, version: int, copied: Copied) -> None:
        """Collective over all nodes: make this version of the weights available for a plan's copies."""

    @abstractmethod
    def fetch(self, copies: CopyList, version: int, slots_nP: Tensor) -> Pending:
        """Start filling this rank's slots with the copies it holds."""

    @abstractmethod
    def gradient_slots(self, copies: CopyList) -> Tensor:
        """[n, P] buffer for the gradients of the copies held here; one list at a time."""

    @abstractmethod
    def give_back(self, copies: CopyList) -> Pending:
        """Start returning the gradients in the slots; waiting adds them to the origins', by holding rank and expert."""

    def finish_sums(self) -> None:  # noqa: B027 - most paths add gradients in `wait`
        """Make later computation see all gradients added so far."""

    def finish_reads(self) -> None:  # noqa: B027 - most paths read no weights after `fetch` or `publish`
        """Collective over all nodes, before weights change: wait until no rank reads them for copies."""

    def close(self) -> None:  # noqa: B027
        """Release memory and threads."""


class CollectiveEngine(TransferEngine):
    """All-to-all inside the node, on gloo and NCCL. Weights are read when fetched, so their version is always right."""

    def __init__(self, group: ExpertGroup, *, num_slots: int, row: Tensor, gradient_dtype: torch.dtype) -> None:
        self.group = group
        self.row = row
        """an empty row that gives width, dtype and device"""
        self.gradients = torch.zeros(num_slots, row.numel(), dtype=gradient_dtype, device=row.device)
        self._sent, self._received = Staging(row), Staging(row.to(gradient_dtype))

    @property
    def num_bytes(self) -> int:
        return self.gradients.nbytes + self._sent.num_bytes + self._received.num_bytes

    def publish(self, version: int, copied: Copied) -> None:  # noqa: ARG002 - weights are read when they are fetched
        self._sent.expect(copied.most_served)
        self._received.expect(copied.most_served)

    def fetch(self, copies: CopyList, version: int, slots_nP: Tensor) -> Pending:  # noqa: ARG002
        if copies.num_in_node == 0:
            return Ready()
        staged = self._sent.take(copies.served_expert.size)
        sent = staged[: copies.served_expert.size]
        for row, expert in enumerate(copies.served_expert.tolist()):
            self.source.write_flat(copies.layer, expert, sent[row])
        moving = self.group.all_to_all(
            Channel.COPIES, sent, copies.served_sizes, slots_nP, copies.held_sizes,
            what=f"fetching flash copies of MoE layer {copies.layer}",
        )  # fmt: skip
        return Then(moving, lambda: self._sent.give_back(staged))

    def gradient_slots(self, copies: CopyList) -> Tensor:
        return self.gradients[: copies.held_expert.size]

    def give_back(self, copies: CopyList) -> Pending:
        if copies.num_in_node == 0:
            return Ready()
        staged = self._received.take(copies.served_expert.size)
        moving = self.group.all_to_all(
            Channel.GRADIENTS, self.gradients[: copies.held_expert.size], copies.held_sizes,
            staged[: copies.served_expert.size], copies.served_sizes,
            what=f"returning gradients of flash copies of MoE layer {copies.layer}",
        )  # fmt: skip
        return Then(moving, partial(self._add, copies, staged))

    def _add(self, copies: CopyList, rows_kP: Tensor) -> None:
        for row, expert in enumerate(copies.served_expert.tolist()):  # by holding rank and expert
            self.source.add_gradient(copies.layer, expert, rows_kP[row])
        self._received.give_back(rows_kP)


class Staging:
    """A pool of row buffers, as many as were ever in flight at once."""

    def __init__(self, like_P: Tensor) -> None:
        self._like_P = like_P
        self._most = 0
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def expect(self, most: int) -> None:
        """Make room for lists of up to `most` rows; smaller buffers are freed."""
        self._most = max(self._most, most)
        free, self._free = self._free, []
        for rows_nP in free:
            self.give_back(rows_nP)

    def take(self, needed: int = 0) -> Tensor:
        """[most, P] for exclusive use until it is given back; `most` grows to what is needed."""
        if needed > self._most:
            self.expect(needed)
        if self._free:
            return self._free.pop()
        made = self._like_P.new_empty(self._most, self._like_P.numel())
        self.num_bytes += made.nbytes
        return made

    def give_back(self, rows_nP: Tensor) -> None:
        if len(rows_nP) < self._most:
            self.num_bytes -= rows_nP.nbytes
        else:
            self._free.append(rows_nP)


class HostEngine(TransferEngine):
    """Copies through one shared memory segment per node of R ranks, with n published instances and S spare slots each.

        segment:  version [n] int64 | weights [n, P] | gradients [2, R, S, P]

    After weights change, every rank writes the instances that the plan copies, then their version. A fetch is a
    one-sided read in a thread. Gradients are written where the origin reads them; an all-reduce over the node says that
    all have written. With two banks, a rank overwrites list k by k + 2 only after all ranks have finished k (before
    sending k + 1).
    """

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
