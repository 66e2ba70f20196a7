"""M2N between machines that share no memory: gloo, a connection and a receiving thread for each pair of processes.

Boxes and trays are in the receiving process. The thread waits for the next message, receives it in place and wakes the
process; so sends never wait for what the other side computes. Slower than shared memory, and the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import RankLostError
from equilibra.rollout.m2n import FIXED, Message, Pairs, SharedMesh, Sleeper

__all__ = ["GlooReceiver", "GlooSender"]

FOREVER = timedelta(days=365)
"""an idle engine is no error; the pool notices a lost process"""


class _Connected(Sleeper):
    """A process with a thread for every process of the other side."""

    def __init__(self, mesh: SharedMesh, rank: int, others: range, address: str) -> None:
        super().__init__(mesh, rank)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=address, rank=rank, world_size=mesh.shape.processes, timeout=FOREVER
            )
        self.others, self.shape = others, mesh.shape
        self._error: str | None = None

    def listen(self, receive: Callable[[int], None]) -> None:
        """Call `receive` with the number of every process of the other side, again and again."""
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
    """An attention process's end."""

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
        head = self.get(receiver, torch.empty(1, dtype=torch.int64))
        slot = int(head[0])
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
    """An expert process's end."""

    def __init__(self, mesh: SharedMesh, number: int, address: str) -> None:
        shape = mesh.shape
        super().__init__(mesh, shape.senders + number, range(shape.senders), address)
        self._boxes = torch.zeros(shape.senders, shape.slots, shape.tokens, shape.width, dtype=shape.dtype)
        self._messages: dict[tuple[int, int], Message] = {}
        """in the order they came"""
        self.listen(self._receive)

    def _receive(self, sender: int) -> None:
        head = self.get(sender, torch.empty(FIXED, dtype=torch.int64))
        slot, layer, rows, num = head.tolist()
        about: NDArray[Any] = self.get(sender, torch.empty(3, num, dtype=torch.int32)).numpy()
        rows_ND = self.get(sender, self._boxes[sender, slot, :rows])
        pairs = Pairs(layer=layer, row_P=about[0], expert_P=about[1], place_P=about[2])
        self._messages[sender, slot] = Message(sender=sender, slot=slot, pairs=pairs, rows_ND=rows_ND)

    def ready(self) -> list[Message]:
        self.check()
        return list(self._messages.values())

    def reply(self, message: Message, results_PD: Tensor) -> None:
        del self._messages[message.sender, message.slot]  # before the box is the sender's again
        self.put(message.sender, torch.tensor([message.slot]), results_PD.contiguous())
