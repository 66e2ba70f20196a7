"""M2N on GPUs: boxes and trays in GPU memory that other processes open once; signals that streams write.

A message is one kernel that gathers rows straight into the receiver's memory (over NVLink, or inside a GPU that several
processes share) and a write of the signal behind it in the same stream. Nothing passes through host memory but headers,
and nobody synchronises with a device: the receiver's host looks at the signal and starts the experts behind it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.execute.copies.device_paths import handle_of, opened
from equilibra.execute.copies.segment import Signals, register_with_device
from equilibra.rollout.m2n import SharedMesh, SharedReceiver, SharedSender

__all__ = ["DeviceReceiver", "DeviceSender"]


class _OnDevice:
    """What both ends have: their own memory, that of the other side, and signals."""

    def __init__(self, mesh: SharedMesh, device: torch.device, shape: tuple[int, ...], signals: NDArray[Any]) -> None:
        self.device = device
        self.own = torch.zeros(shape, dtype=mesh.shape.dtype, device=device)
        self._others: dict[int, Tensor] = {}
        raw = mesh.memory.tensor(0, (mesh.memory.num_bytes,), torch.uint8)
        register_with_device(raw, device)
        self.signals, self.shape = Signals(signals, device), signals.shape
        torch.cuda.synchronize(device)  # zeros are written before others write rows

    def handle(self) -> Any:  # noqa: ANN401
        return handle_of(self.own)

    def open(self, handles: list[Any]) -> None:
        """By number of the other side."""
        self._others = {n: opened(one, self.own.dtype, self.device) for n, one in enumerate(handles)}

    def of(self, other: int) -> Tensor:
        if other not in self._others:
            raise ExecuteError(f"the memory of process {other} of the other side is not open: a defect")
        return self._others[other]

    def give(self, sender: int, receiver: int, slot: int, value: int) -> None:
        _, receivers, slots = self.shape
        self.signals.give((sender * receivers + receiver) * slots + slot, value, torch.cuda.current_stream(self.device))

    def index(self, numbers: Tensor) -> Tensor:
        return numbers.pin_memory().to(self.device, non_blocking=True)


class DeviceSender(SharedSender):
    """An attention process's end: its tray is on its GPU."""

    def __init__(self, mesh: SharedMesh, number: int, device: torch.device) -> None:
        super().__init__(mesh, number)
        shape = mesh.shape
        self.memory = _OnDevice(mesh, device, (shape.slots, shape.tokens * shape.top_k, shape.width), mesh.sent)

    def _put(self, receiver: int, slot: int, hidden_TD: Tensor, tokens_N: Tensor) -> None:
        box_ND = self.memory.of(receiver)[self.number, slot, : len(tokens_N)]
        torch.index_select(hidden_TD, 0, self.memory.index(tokens_N), out=box_ND)

    def _signal(self, receiver: int, slot: int, value: int) -> None:
        self.memory.give(self.number, receiver, slot, value)

    def tray(self, slot: int) -> Tensor:
        return self.memory.own[slot]

    def wait(self, mark: int, timeout_s: float) -> None:
        """A stream wakes nobody, so look again at once while results are on their way."""
        if (self.mesh.answered[self.number] < self._count).any():
            os.sched_yield()
        else:
            super().wait(mark, timeout_s)


class DeviceReceiver(SharedReceiver):
    """An expert process's end: its boxes are on its GPU."""

    def __init__(self, mesh: SharedMesh, number: int, device: torch.device) -> None:
        super().__init__(mesh, number)
        shape = mesh.shape
        self.memory = _OnDevice(mesh, device, (shape.senders, shape.slots, shape.tokens, shape.width), mesh.answered)

    def _box(self, sender: int, slot: int, rows: int) -> Tensor:
        return self.memory.own[sender, slot, :rows]

    def _put(self, sender: int, slot: int, place_P: NDArray[np.int32], results_PD: Tensor) -> None:
        places_P = self.memory.index(torch.from_numpy(place_P.astype(np.int64)))
        self.memory.of(sender)[slot].index_copy_(0, places_P, results_PD)

    def _signal(self, sender: int, slot: int, value: int) -> None:
        self.memory.give(sender, self.number, slot, value)

    def wait(self, mark: int, timeout_s: float) -> None:
        """As the sender's."""
        if (self.mesh.announced[:, self.number] > self._seen).any():
            os.sched_yield()
        else:
            super().wait(mark, timeout_s)
