"""How rows travel: through shared memory, between GPUs (CUDA IPC), or over gloo.

`Ends` is a value that is sent to a worker, which makes its end of the M2N buffers from it.

GPUs: boxes and trays are GPU memory that the other side opens once. A message is one kernel that gathers rows straight
into the receiver's memory (over NVLink, or inside a GPU that several processes share), followed in the same stream by a
write of the signal. Only headers pass through host memory, and no process synchronises with a device: the receiver
looks at the signal and queues the experts behind it.

gloo: a connection and a receiving thread for each pair of processes. Boxes and trays are private to the receiving
process. The thread waits for the next message, receives it in place and wakes the process, so a send never waits for
the other side's compute. Slower than shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError, RankLostError
from equilibra.execute.copies.device_paths import handle_of, opened
from equilibra.execute.copies.segment import Signals, register_with_device
from equilibra.rollout.m2n import FIXED, End, MeshShape, Message, Pairs, SharedMesh, SharedReceiver, SharedSender
from equilibra.rollout.memory import Memory, Where

FOREVER = timedelta(days=365)
"""an idle engine is no error; the pool notices a lost process"""


class _OnDevice:
    """GPU memory of one process and of the other side, and signals that streams write."""

    def __init__(self, mesh: SharedMesh, device: torch.device, shape: tuple[int, ...], signals: NDArray[Any]) -> None:
        self.device = device
        self.own = torch.zeros(shape, dtype=mesh.shape.dtype, device=device)
        self._others: list[Tensor] = []
        register_with_device(mesh.memory.tensor(0, (mesh.memory.num_bytes,), torch.uint8), device)
        self.signals, self.shape = Signals(signals, device), signals.shape
        torch.cuda.synchronize(device)  # zeros must be written before other processes write rows

    def open(self, handles: list[Any]) -> None:
        self._others = [opened(one, self.own.dtype, self.device) for one in handles]

    def of(self, other: int) -> Tensor:
        if not self._others:
            raise ExecuteError(f"the memory of process {other} of the other side is not open: a defect")
        return self._others[other]

    def give(self, sender: int, receiver: int, slot: int, value: int) -> None:
        _, receivers, slots = self.shape
        self.signals.give((sender * receivers + receiver) * slots + slot, value, torch.cuda.current_stream(self.device))

    def index(self, numbers: Tensor) -> Tensor:
        return numbers.pin_memory().to(self.device, non_blocking=True)


class DeviceSender(SharedSender):
    """An attention process's end on a GPU."""

    def __init__(self, mesh: SharedMesh, number: int, device: torch.device) -> None:
        super().__init__(mesh, number)
        shape = mesh.shape
        self.memory = _OnDevice(mesh, device, (shape.slots, shape.tokens * shape.top_k, shape.width), mesh.sent)

    def handle(self) -> Any:  # noqa: ANN401
        return handle_of(self.memory.own)

    def connect(self, handles: list[Any]) -> None:
        self.memory.open(handles[self.mesh.shape.senders :])

    def _put(self, receiver: int, slot: int, hidden_TD: Tensor, tokens_N: Tensor) -> None:
        box_ND = self.memory.of(receiver)[self.number, slot, : len(tokens_N)]
        torch.index_select(hidden_TD, 0, self.memory.index(tokens_N), out=box_ND)

    def _signal(self, receiver: int, slot: int, value: int) -> None:
        self.memory.give(self.number, receiver, slot, value)

    def tray(self, slot: int) -> Tensor:
        return self.memory.own[slot]

    def wait(self, mark: int, timeout_s: float) -> None:
        """A stream cannot wake a process, so poll while results are on their way."""
        if (self.mesh.answered[self.number] < self._count).any():
            os.sched_yield()
        else:
            super().wait(mark, timeout_s)


class DeviceReceiver(SharedReceiver):
    """An expert process's end on a GPU."""

    def __init__(self, mesh: SharedMesh, number: int, device: torch.device) -> None:
        super().__init__(mesh, number)
        shape = mesh.shape
        self.memory = _OnDevice(mesh, device, (shape.senders, shape.slots, shape.tokens, shape.width), mesh.answered)

    def handle(self) -> Any:  # noqa: ANN401
        return handle_of(self.memory.own)

    def connect(self, handles: list[Any]) -> None:
        self.memory.open(handles[: self.mesh.shape.senders])

    def _box(self, sender: int, slot: int, rows: int) -> Tensor:
        return self.memory.own[sender, slot, :rows]

    def _put(self, sender: int, slot: int, place_P: NDArray[np.int32], results_PD: Tensor) -> None:
        places_P = self.memory.index(torch.from_numpy(place_P.astype(np.int64)))
        self.memory.of(sender)[slot].index_copy_(0, places_P, results_PD)

    def _signal(self, sender: int, slot: int, value: int) -> None:
        self.memory.give(sender, self.number, slot, value)

    def wait(self, mark: int, timeout_s: float) -> None:
        """A stream cannot wake a process, so poll while rows are on their way."""
        if (self.mesh.announced[:, self.number] > self._seen).any():
            os.sched_yield()
        else:
            super().wait(mark, timeout_s)


class _Connected(End):
    """A process with a receiving thread for every process of the other side."""

    def __init__(self, mesh: SharedMesh, process: int, others: range, address: str) -> None:
        super().__init__(mesh, process)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=address, rank=process, world_size=mesh.shape.processes, timeout=FOREVER
            )
        self.others, self.shape = others, mesh.shape
        self._error: str | None = None

    def listen(self, receive: Callable[[int], None]) -> None:
        """Call `receive` in a loop, in one thread per process of the other side, with its number."""
        for number, other in enumerate(self.others):
            Thread(target=self._run, args=(receive, number, other), daemon=True).start()

    def _run(self, receive: Callable[[int], None], number: int, other: int) -> None:
        try:
            while True:
                receive(number)
                self._own.wake()
        except (RuntimeError, dist.DistError) as error:
            self._error = f"the connection to process {other} of the engine broke: {error}"
            self._own.wake()

    def check(self) -> None:
        if self._error is not None:
            raise RankLostError(self._error)

    def put(self, number: int, *parts: Tensor) -> None:
        """Send to a process of the other side."""
        for part in parts:
            if part.numel():
                dist.send(part, dst=self.others[number])

    def get(self, number: int, into: Tensor) -> Tensor:
        """Receive from a process of the other side."""
        if into.numel():
            dist.recv(into, src=self.others[number])
        return into


class GlooSender(_Connected):
    """An attention process's end over gloo."""

    def __init__(self, mesh: SharedMesh, number: int, address: str) -> None:
        shape = mesh.shape
        super().__init__(mesh, number, range(shape.senders, shape.processes), address)
        self._trays = torch.zeros(shape.slots, shape.tokens * shape.top_k, shape.width, dtype=shape.dtype)
        self._open = np.zeros((shape.receivers, shape.slots), bool)
        """whether results are on their way"""
        self._places: dict[tuple[int, int], Tensor] = {}
        self.listen(self._receive)

    def send(self, receiver: int, slot: int, hidden_TD: Tensor, tokens_N: NDArray[np.int64], pairs: Pairs) -> None:
        self._places[receiver, slot] = torch.from_numpy(pairs.place_P.astype(np.int64))
        self._open[receiver, slot] = True
        head = torch.tensor([slot, pairs.layer, tokens_N.size, pairs.row_P.size])
        about = torch.from_numpy(np.stack([pairs.row_P, pairs.expert_P, pairs.place_P]))
        self.put(receiver, head, about, hidden_TD[torch.from_numpy(tokens_N)])

    def _receive(self, receiver: int) -> None:
        slot = int(self.get(receiver, torch.empty(1, dtype=torch.int64)))
        places = self._places[receiver, slot]
        results = self.get(receiver, torch.empty(len(places), self.shape.width, dtype=self.shape.dtype))
        self._trays[slot].index_copy_(0, places, results)
        self._open[receiver, slot] = False

    def arrived(self, slot: int) -> bool:
        self.check()
        return not self._open[:, slot].any()

    def tray(self, slot: int) -> Tensor:
        return self._trays[slot]


class GlooReceiver(_Connected):
    """An expert process's end over gloo."""

    def __init__(self, mesh: SharedMesh, number: int, address: str) -> None:
        shape = mesh.shape
        super().__init__(mesh, shape.senders + number, range(shape.senders), address)
        self._boxes = torch.zeros(shape.senders, shape.slots, shape.tokens, shape.width, dtype=shape.dtype)
        self._messages: dict[tuple[int, int], Message] = {}
        """in order of arrival"""
        self.listen(self._receive)

    def _receive(self, sender: int) -> None:
        slot, layer, rows, num = self.get(sender, torch.empty(FIXED, dtype=torch.int64)).tolist()
        row_P, expert_P, place_P = self.get(sender, torch.empty(3, num, dtype=torch.int32)).numpy()
        rows_ND = self.get(sender, self._boxes[sender, slot, :rows])
        pairs = Pairs(layer=layer, row_P=row_P, expert_P=expert_P, place_P=place_P)
        self._messages[sender, slot] = Message(sender=sender, slot=slot, pairs=pairs, rows_ND=rows_ND)

    def ready(self) -> list[Message]:
        self.check()
        return list(self._messages.values())

    def reply(self, message: Message, results_PD: Tensor) -> None:
        del self._messages[message.sender, message.slot]  # before the sender may reuse the box
        self.put(message.sender, torch.tensor([message.slot]), results_PD.contiguous())


Sender = SharedSender | GlooSender
Receiver = SharedReceiver | GlooReceiver


class Ends(NamedTuple):
    """The M2N buffers of an engine; each worker makes its end from them."""

    shape: MeshShape
    where: Where
    address: str = ""
    """where processes meet for gloo; empty: they share memory"""

    def sender(self, number: int, device: torch.device) -> Sender:
        """The end of an attention process; on GPUs, call `connect` before use."""
        mesh = SharedMesh(Memory.open(self.where), self.shape)
        if self.address:
            return GlooSender(mesh, number, self.address)
        return DeviceSender(mesh, number, device) if device.type == "cuda" else SharedSender(mesh, number)

    def receiver(self, number: int, device: torch.device) -> Receiver:
        """The end of an expert process; on GPUs, call `connect` before use."""
        mesh = SharedMesh(Memory.open(self.where), self.shape)
        if self.address:
            return GlooReceiver(mesh, number, self.address)
        return DeviceReceiver(mesh, number, device) if device.type == "cuda" else SharedReceiver(mesh, number)
