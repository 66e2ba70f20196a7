"""M2N: rows of tokens from M senders (attention) to N receivers (experts) and back, by one-sided writes.

Symbols: M senders, N receivers, S slots (micro-batches in flight per sender), T tokens of a micro-batch, K experts per
token, P pairs of (token, expert), D width of a row.

    box [M, N, S]     T rows at the receiver, for each sender and slot
    tray [M, S]       T x K rows at the sender; each receiver writes its results at the places the message names
    header            layer, number of rows, and for each pair its row in the box, its expert and its place in the tray;
                      always in host memory
    signal            number of the last complete message; a receiver polls only this

Buffers are made and registered once. A message is a copy of rows, a header and a signal, without a call into a
communication library and without waiting for the other side. A sender reuses a box only after its results are back, so
unread rows are never overwritten. Processes that no token needs get no message.

`SharedMesh` is the memory that all processes map, and the ends here keep everything in it; `ends` has those on GPUs and
over gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.rollout.memory import Memory, Word

LAYER, ROWS, PAIRS, FIXED = 0, 1, 2, 4
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of all buffers."""

    senders: int
    receivers: int
    slots: int
    tokens: int
    """most tokens of a micro-batch"""
    top_k: int
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def processes(self) -> int:
        return self.senders + self.receivers


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """The (token, expert) pairs of a message, sorted by expert."""

    layer: int
    row_P: NDArray[np.int32]
    """row of the token in the message"""
    expert_P: NDArray[np.int32]
    place_P: NDArray[np.int32]
    """row of the result in the sender's tray"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """A message, as its receiver reads it."""

    sender: int
    slot: int
    pairs: Pairs
    rows_ND: Tensor
    """view of the box"""


class SharedMesh:
    """All buffers, in memory that every process maps."""

    def __init__(self, memory: Memory, shape: MeshShape) -> None:
        self.memory, self.shape = memory, shape
        of = shape.senders, shape.receivers, shape.slots
        words, headers, boxes, trays, end = self._offsets(shape)
        # [M, N, S] signals of messages, signals of results, and messages sent, complete or not
        self.sent, self.answered, self.announced = memory.numpy(words, (3, *of), np.int64)
        after = words + 3 * self.sent.nbytes
        self.progress = memory.numpy(after, (shape.processes,), np.int64)
        """passes of each process: senders, then receivers"""
        self.wake = memory.numpy(after + self.progress.nbytes, (shape.processes,), np.int32)
        """words that senders, then receivers, sleep on"""
        self.headers = memory.numpy(headers, (*of, FIXED + 3 * shape.tokens * shape.top_k), np.int32)
        if memory.num_bytes >= end:  # otherwise they are on GPUs
            self.boxes = memory.tensor(boxes, (*of, shape.tokens, shape.width), shape.dtype)
            trays_of = shape.senders, shape.slots, shape.tokens * shape.top_k, shape.width
            self.trays = memory.tensor(trays, trays_of, shape.dtype)
            self.rows_of_trays = memory.numpy(trays, trays_of[:3], f"V{shape.row_bytes}")
            """[M, S, T * K] the trays for numpy, which copies rows several times as fast as torch's index_copy_"""

    @staticmethod
    def _offsets(shape: MeshShape) -> tuple[int, ...]:
        """First bytes of signals, headers, boxes, trays, and the end."""
        of = shape.senders * shape.receivers * shape.slots
        sizes = (
            3 * 8 * of + 12 * shape.processes,
            of * 4 * (FIXED + 3 * shape.tokens * shape.top_k),
            of * shape.tokens * shape.row_bytes,
            shape.senders * shape.slots * shape.tokens * shape.top_k * shape.row_bytes,
        )
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        return (0, *ends)

    @classmethod
    def num_bytes(cls, shape: MeshShape, *, on_device: bool = False) -> int:
        """Shared memory for a shape. on_device: boxes and trays are elsewhere."""
        offsets = cls._offsets(shape)
        return offsets[2] if on_device else offsets[4]

    def word(self, process: int, writer: int) -> Word:
        return Word(self.wake, process, writer=writer, processes=self.shape.processes)


class End:
    """A process's end of the mesh, and the word it sleeps on."""

    def __init__(self, mesh: SharedMesh, process: int) -> None:
        self.mesh, self.process = mesh, process
        self._own = mesh.word(process, process)

    def mark(self) -> int:
        """Take a mark before looking for signals; `wait` takes it."""
        return self._own.value()

    def wait(self, mark: int, timeout_s: float) -> None:
        """Sleep until something has arrived since the mark."""
        self._own.wait(mark, timeout_s)

    def made_progress(self) -> None:
        """Count a pass, so that a waiting engine sees that this process lives."""
        self.mesh.progress[self.process] += 1

    def handle(self) -> Any:  # noqa: ANN401
        """What other processes need to open this one's GPU memory; None if everything is in shared memory."""
        return None

    def connect(self, handles: list[Any]) -> None:
        """Open the GPU memory of the other side. handles: of all processes."""


class SharedSender(End):
    """A sender's end in shared memory."""

    def __init__(self, mesh: SharedMesh, number: int) -> None:
        super().__init__(mesh, number)
        self.number, shape = number, mesh.shape
        self._words = [mesh.word(shape.senders + receiver, number) for receiver in range(shape.receivers)]
        self._count = np.zeros((shape.receivers, shape.slots), np.int64)

    def send(self, receiver: int, slot: int, hidden_TD: Tensor, tokens_N: NDArray[np.int64], pairs: Pairs) -> None:
        """Write the rows `tokens` of `hidden` into the receiver's box."""
        header, num = self.mesh.headers[self.number, receiver, slot], pairs.row_P.size
        header[:FIXED] = pairs.layer, tokens_N.size, num, 0
        header[FIXED : FIXED + 3 * num].reshape(3, num)[:] = pairs.row_P, pairs.expert_P, pairs.place_P
        self._put(receiver, slot, hidden_TD, torch.from_numpy(tokens_N))
        self._count[receiver, slot] += 1
        self.mesh.announced[self.number, receiver, slot] = self._count[receiver, slot]
        self._signal(receiver, slot, int(self._count[receiver, slot]))
        self._words[receiver].wake()

    def _put(self, receiver: int, slot: int, hidden_TD: Tensor, tokens_N: Tensor) -> None:
        box_ND = self.mesh.boxes[self.number, receiver, slot, : len(tokens_N)]
        torch.index_select(hidden_TD, 0, tokens_N, out=box_ND)

    def _signal(self, receiver: int, slot: int, value: int) -> None:
        self.mesh.sent[self.number, receiver, slot] = value

    def arrived(self, slot: int) -> bool:
        """Whether all results of what was sent from the slot are in its tray."""
        return bool((self.mesh.answered[self.number, :, slot] == self._count[:, slot]).all())

    def tray(self, slot: int) -> Tensor:
        """[T * K, D]"""
        return self.mesh.trays[self.number, slot]


class SharedReceiver(End):
    """A receiver's end in shared memory."""

    def __init__(self, mesh: SharedMesh, number: int) -> None:
        shape = mesh.shape
        super().__init__(mesh, shape.senders + number)
        self.number = number
        self._words = [mesh.word(sender, self.process) for sender in range(shape.senders)]
        self._seen = np.zeros((shape.senders, shape.slots), np.int64)
        """messages that have arrived"""
        self._messages: dict[tuple[int, int], Message] = {}
        """not answered yet, in order of arrival"""

    def ready(self) -> list[Message]:
        """Messages not answered yet, oldest first."""
        for sender, slot in np.argwhere(self.mesh.sent[:, self.number] > self._seen).tolist():
            self._seen[sender, slot] += 1
            self._messages[sender, slot] = self._message(sender, slot)
        return list(self._messages.values())

    def _message(self, sender: int, slot: int) -> Message:
        header = self.mesh.headers[sender, self.number, slot]
        num = int(header[PAIRS])
        row_P, expert_P, place_P = header[FIXED : FIXED + 3 * num].reshape(3, num)
        pairs = Pairs(layer=int(header[LAYER]), row_P=row_P, expert_P=expert_P, place_P=place_P)
        rows_ND = self._box(sender, slot, int(header[ROWS]))
        return Message(sender=sender, slot=slot, pairs=pairs, rows_ND=rows_ND)

    def _box(self, sender: int, slot: int, rows: int) -> Tensor:
        return self.mesh.boxes[sender, self.number, slot, :rows]

    def reply(self, message: Message, results_PD: Tensor) -> None:
        """Write results into the sender's tray; the sender may then reuse the box."""
        sender, slot = message.sender, message.slot
        self._put(sender, slot, message.pairs.place_P, results_PD)
        del self._messages[sender, slot]
        self._signal(sender, slot, int(self._seen[sender, slot]))
        self._words[sender].wake()

    def _put(self, sender: int, slot: int, place_P: NDArray[np.int32], results_PD: Tensor) -> None:
        rows_P = results_PD.contiguous().view(torch.uint8).numpy().view(self.mesh.rows_of_trays.dtype)[:, 0]
        self.mesh.rows_of_trays[sender, slot][place_P] = rows_P

    def _signal(self, sender: int, slot: int, value: int) -> None:
        self.mesh.answered[sender, self.number, slot] = value
