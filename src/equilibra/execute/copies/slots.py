"""Spare slots: one buffer per rank for the flash copies of all layers.

The buffer has `depth + 1` banks: one that a layer computes with, the others for layers whose copies are on their way.
A bank is found again by (stage, micro-batch, layer) as long as nothing else needed it, so a layer that is visited twice
in a row fetches once. Which bank is taken depends only on the order of calls, which is the same on all ranks of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from equilibra.core.errors import BudgetError
from equilibra.core.visit import CopyList, VisitKey
from equilibra.execute.copies.transfer import TransferEngine
from equilibra.execute.group import Pending
from equilibra.execute.record import Moment, Span

__all__ = ["SpareSlots", "Taken"]


@dataclass(kw_only=True)
class _Bank:
    rows_SP: Tensor
    key: VisitKey | None = None
    arriving: Pending | None = None
    started: Moment | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """Copies that have arrived."""

    rows_nP: Tensor
    """[n, P]"""
    span: Span | None
    """from when they were asked for to when they were there, None if they were taken before"""


class SpareSlots:
    """Banks in the order they were last used."""

    def __init__(self, *, num_slots: int, depth: int, row: Tensor, now: Callable[[], Moment] = perf_counter) -> None:
        self.num_slots, self._now = num_slots, now
        self._banks = [
            _Bank(rows_SP=torch.zeros(num_slots, row.numel(), dtype=row.dtype, device=row.device))
            for _ in range(depth + 1)
        ]

    @property
    def num_bytes(self) -> int:
        """Memory of all banks."""
        return sum(bank.rows_SP.nbytes for bank in self._banks)

    def start(self, key: VisitKey, copies: CopyList, engine: TransferEngine, version: int) -> None:
        """Fetch copies into the bank that was not used for longest, unless one has them."""
        if copies.num_in_node == 0 or any(bank.key == key for bank in self._banks):
            return
        count = copies.held_expert.size
        if count > self.num_slots:
            raise BudgetError(f"the plan holds {count} flash copies on a rank that has {self.num_slots} spare slots")
        bank = self._banks.pop(0)
        if bank.arriving is not None:
            bank.arriving.wait()  # a prefetch nobody needed
        bank.key, bank.started = key, self._now()
        bank.arriving = engine.fetch(copies, version, bank.rows_SP[:count])
        self._banks.append(bank)

    def take(self, key: VisitKey, copies: CopyList, engine: TransferEngine, version: int) -> Taken:
        """The copies, when they have arrived."""
        if copies.num_in_node == 0:
            return Taken(rows_nP=self._banks[0].rows_SP[:0], span=None)
        self.start(key, copies, engine, version)
        at = next(i for i, bank in enumerate(self._banks) if bank.key == key)
        bank = self._banks.pop(at)
        self._banks.append(bank)  # now the last to be overwritten
        started, bank.started = bank.started, None
        arriving, bank.arriving = bank.arriving, None
        if arriving is not None:
            arriving.wait()
        span = None if started is None else getattr(arriving, "span", (started, self._now()))
        return Taken(rows_nP=bank.rows_SP[: copies.held_expert.size], span=span)

    def forget(self) -> None:
        """The weights have changed: no copy is good any more."""
        for bank in self._banks:
            if bank.arriving is not None:
                bank.arriving.wait()
            bank.key, bank.arriving, bank.started = None, None, None
