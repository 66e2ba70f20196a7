"""The host path on GPUs: shared memory of the node that every rank registers with its GPU.

Symbols: n published instances, R ranks of the node, S spare slots, P values of one expert in flat form.

    segment:  signals [2R] int64 | weights [n, P] | gradients [2, R, S, P]

After weights change, every rank writes the instances that the plan copies; GPUs pull them over the host link, which is
otherwise idle. Gradients return the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibra.core.visit import CopyList
from equilibra.execute.copies.segment import (
    PAGE,
    Signals,
    map_of_node,
    pages,
    register_with_device,
    unregister,
    view_of,
)
from equilibra.execute.copies.standing import Sources
from equilibra.execute.copies.transfer import Copied
from equilibra.execute.group import ExpertGroup

__all__ = ["PinnedPath", "signals_of_node"]


@dataclass(kw_only=True, eq=False)
class _Part:
    values: Tensor
    raw: Tensor
    """uint8"""
    device: torch.device

    @classmethod
    def of(cls, group: ExpertGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Part:
        num_bytes = max(pages(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), PAGE)
        memory = map_of_node(group, num_bytes)
        raw = view_of(memory, 0, (num_bytes,), torch.uint8)
        group.all_succeed(lambda: register_with_device(raw, device), what="registering shared memory with CUDA")
        return cls(values=view_of(memory, 0, shape, dtype), raw=raw, device=device)

    def close(self) -> None:
        unregister(self.raw, self.device)


def signals_of_node(group: ExpertGroup, device: torch.device) -> tuple[Signals, _Part]:
    """Given and taken signals of every rank of the node, initially 0."""
    part = _Part.of(group, (2 * group.cluster.ranks_per_node,), torch.int64, device)
    return Signals(part.values.numpy(), device), part


class PinnedPath:
    """A DevicePath through registered host memory."""

    in_place = False

    def __init__(self, group: ExpertGroup, banks_2SP: Tensor, row: Tensor) -> None:
        self.group, self.banks_2SP, self.row = group, banks_2SP, row
        self.signals, self._signals = signals_of_node(group, row.device)
        shape = (2, group.cluster.ranks_per_node, *banks_2SP.shape[1:])
        self._gradients = _Part.of(group, shape, banks_2SP.dtype, row.device)
        self._weights: _Part | None = None
        self._copied: Copied | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.raw.nbytes for part in (self._signals, self._gradients, self._weights) if part is not None)

    def publish(self, copied: Copied, source: Sources) -> None:
        needed = copied.most_of_a_node
        if self._weights is None or len(self._weights.values) < needed:
            if self._weights is not None:
                self._weights.close()
            shape = (needed, self.row.numel())
            self._weights = _Part.of(self.group, shape, self.row.dtype, self.row.device)
        for entry in np.flatnonzero(copied.origin == self.group.rank).tolist():
            source.write_flat(int(copied.layer[entry]), int(copied.expert[entry]), self._weights.values[entry])
        self._copied = copied

    def pull_weights(self, copies: CopyList, slots_nP: Tensor, *, first: int = 0) -> None:
        """Pull the values of every copy from `first` on."""
        assert self._weights is not None
        assert self._copied is not None
        for slot, entry in enumerate(self._copied.entries(copies)):
            slots_nP[slot, first:].copy_(self._weights.values[entry, first:], non_blocking=True)

    def push_gradients(self, bank: int, count: int) -> None:
        mine = self._gradients.values[bank, self.group.rank - self.group.first_of_node]
        mine[:count].copy_(self.banks_2SP[bank, :count], non_blocking=True)

    def gradients(self, copies: CopyList, bank: int, rows_kP: Tensor) -> list[Tensor]:
        for row, target, slot in zip(rows_kP, copies.served_target.tolist(), copies.served_slot.tolist(), strict=True):
            row.copy_(self._gradients.values[bank, target - copies.first_rank, slot], non_blocking=True)
        return list(rows_kP)

    def close(self) -> None:
        """The memory is freed with the last rank that maps it."""
        for part in (self._signals, self._gradients, self._weights):
            if part is not None:
                part.close()
