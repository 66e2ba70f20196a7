"""Device paths: copies travel on a side stream, and GPUs signal each other without the host.

Symbols: S spare slots per rank, R ranks of the node, P values of one expert in flat form, n number of a list.

    fetch        the side stream waits for the compute stream's work so far (it may still use the slots), then pulls;
                 the compute stream waits for the side stream where copies are taken
    gradients    [2, S, P] on the holding rank: list n is in bank n % 2
    give back    holder: signal given = n once they are computed
                 origin: its side stream waits for given = n of the holders, pulls into staging rows, signals taken = n
    sums         on the side stream, after the layer's own gradients: those of copies by holding rank and expert. The
                 compute stream waits for them a layer later
                 holder: before list n + 2 its compute stream waits until all have taken list n

`DevicePath` is where weights and gradients are pulled from: `ipc` another GPU's memory, `host` shared host memory. All
ranks of a node make the same calls, so their list numbers agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import InputError, RankLostError, StaleError
from equilibra.core.visit import CopyList
from equilibra.execute.copies.segment import Signals
from equilibra.execute.copies.standing import StandingStore
from equilibra.execute.copies.transfer import Copied, TransferEngine
from equilibra.execute.group import ExpertGroup, Pending, Ready
from equilibra.execute.record import mark


class DevicePath(Protocol):
    """Where a GPU pulls from. Every call queues its work on the current stream."""

    signals: Signals
    """given and taken of every rank of the node"""
    in_place: bool
    """whether gradients can be added directly from every holder's memory"""

    @property
    def num_bytes(self) -> int: ...

    def publish(self, copied: Copied, source: StandingStore) -> None:
        """Collective: make new weights available to pull."""

    def pull_weights(self, copies: CopyList, slots_nP: Tensor) -> None:
        """Fill slots with the copies this rank holds."""

    def push_gradients(self, bank: int, count: int) -> None:
        """Make the first `count` gradients of this rank's bank available to their origins."""

    def gradients(self, copies: CopyList, bank: int, rows_kP: Tensor) -> list[Tensor]:
        """Gradients of other ranks' copies of this rank's instances, by holder and expert: pulled or in place."""

    def close(self) -> None: ...


def streams_are_serial() -> bool:
    """Whether the environment gives all streams of a GPU one queue, as Megatron's launchers may."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class DeviceEngine(TransferEngine):
    """Copies on GPUs over a path."""

    def __init__(self, group: ExpertGroup, banks_2SP: Tensor, row: Tensor, path: DevicePath) -> None:
        if streams_are_serial():
            raise InputError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 serialises all streams of a GPU, so ranks could deadlock: unset it, or "
                "use the collective path"
            )
        self.group, self.path, self.banks_2SP = group, path, banks_2SP
        self._row = row
        self._side = torch.cuda.Stream(row.device)  # type: ignore[no-untyped-call]
        self._version: int | None = None
        self._list = 0
        """number of gradient lists so far"""
        self._summed: torch.cuda.Event | None = None
        """when the last returned gradients were added"""
        self._staging_kP = banks_2SP.new_empty(0, row.numel())
        self._me, self._num_ranks = group.rank - group.first_of_node, group.cluster.ranks_per_node
        group.watch.release_with(path.signals.release)

    @property
    def num_bytes(self) -> int:
        return self.banks_2SP.nbytes + self._staging_kP.nbytes + self.path.num_bytes

    @property
    def _compute(self) -> torch.cuda.Stream:
        """The stream that computes experts; its device need not be the current one."""
        return torch.cuda.current_stream(self._row.device)

    def publish(self, version: int, copied: Copied) -> None:
        """Block the host until published: nothing could run meanwhile."""
        what = "waiting for readers of the last version"
        for stream in (self._side, self._compute):
            self.group.finish(stream, what=what)
        self.group.barrier(what=what)
        self.path.publish(copied, self.source)
        self.group.finish(self._compute, what="publishing weights")
        self.group.barrier(what="publishing weights")
        self._version = version
        most = 0 if self.path.in_place else copied.most_served
        if len(self._staging_kP) < most:
            self._staging_kP = self.banks_2SP.new_empty(most, self._row.numel())

    def fetch(self, copies: CopyList, version: int, slots_nP: Tensor) -> Pending:
        if copies.held_expert.size == 0:
            return Ready()
        if version != self._version:
            raise StaleError(f"weights of version {self._version} are published, version {version} was asked for")
        self._side.wait_stream(self._compute)
        with torch.cuda.stream(self._side):
            start = mark(self._side)
            self.path.pull_weights(copies, slots_nP)
            return _Arriving((start, mark(self._side)), self._row.device)

    def gradient_slots(self, copies: CopyList) -> Tensor:
        """The bank of this list, once origins have taken the list before the last from it."""
        if self._list >= 2 and copies.num_in_node:
            for rank in range(self._num_ranks):
                self.path.signals.wait(self._num_ranks + rank, self._list - 1, self._compute)
        return self.banks_2SP[self._list % 2, : copies.held_expert.size]

    def give_back(self, copies: CopyList) -> Pending:
        """Signal that gradients are ready, and queue the pull of those of other ranks."""
        if copies.num_in_node == 0:
            return Ready()
        bank = self._list % 2
        self._list += 1
        coming = _Coming(copies=copies, bank=bank, number=self._list, add=self._add)
        self._side.wait_stream(self._compute)
        with torch.cuda.stream(self._side):
            self.path.push_gradients(bank, copies.held_expert.size)
            self.path.signals.give(self._me, self._list, self._side)
            if not self.path.in_place:
                self._receive(coming)
                self._taken(coming)
        return coming

    def _receive(self, coming: _Coming) -> None:
        """Wait for the holders' signals, then pull or locate the gradients."""
        copies = coming.copies
        for rank in sorted(set((copies.served_target - copies.first_rank).tolist())):
            self.path.signals.wait(rank, coming.number, self._side)
        coming.start = mark(self._side)
        coming.rows = self.path.gradients(copies, coming.bank, self._staging_kP[: copies.served_expert.size])

    def _taken(self, coming: _Coming) -> None:
        """Signal that holders may overwrite the bank."""
        self.path.signals.give(self._num_ranks + self._me, coming.number, self._side)
        coming.end = mark(self._side)

    def _add(self, coming: _Coming) -> None:
        """Add on the side stream, beside later work of the compute stream."""
        self.finish_sums()
        self._side.wait_stream(self._compute)
        experts = coming.copies.served_expert
        with torch.cuda.stream(self._side):
            if self.path.in_place:
                self._receive(coming)
            for expert in sorted(set(experts.tolist())):  # those of one expert at once, by holding rank
                rows = [coming.rows[row] for row in np.flatnonzero(experts == expert).tolist()]
                self.source.add_gradient(coming.copies.layer, expert, *rows)
            if self.path.in_place:
                self._taken(coming)
        self._summed = self._side.record_event()
        what = f"returning gradients of flash copies of MoE layer {coming.copies.layer}"
        self.group.watch.expect("returns", what, self._summed.query, self._row.device)

    def finish_sums(self) -> None:
        """Make the compute stream wait until returned gradients are added."""
        if self._summed is not None:
            self._compute.wait_event(self._summed)
            self._summed = None

    def finish_reads(self) -> None:
        what = "waiting for copies under way before weights change"
        self.group.finish(self._side, what=what)
        self.group.barrier(what=what)

    def close(self) -> None:
        """Free memory, and release every stream that still waits."""
        self.path.signals.release()
        with suppress(RuntimeError, RankLostError):  # a device or rank that has failed must not keep us from closing
            self.group.finish(self._side, what="closing copies")
        self.path.signals.release()  # what was queued has given signals of its own since
        self.group.watch.forget(self.path.signals.release)
        self.path.close()


@dataclass(frozen=True)
class _Arriving:
    span: tuple[torch.cuda.Event, torch.cuda.Event]
    """start and end events"""
    device: torch.device

    def wait(self) -> None:
        """Make the compute stream wait; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(self.span[1])


@dataclass(kw_only=True, eq=False)
class _Coming:
    """Gradients returning to this rank."""

    copies: CopyList
    bank: int
    """on their holders"""
    number: int
    """of the list"""
    add: Callable[[_Coming], None]
    rows: list[Tensor] = field(default_factory=list)
    """by holding rank and expert"""
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    """when holders may overwrite them: pulled, or added in place"""

    @property
    def span(self) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        return self.start, self.end

    def wait(self) -> None:
        """Queue the addition; `finish_sums` waits for it."""
        self.add(self)
