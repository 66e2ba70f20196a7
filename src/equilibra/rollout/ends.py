"""How a worker gets its end of the M2N buffers: a value that travels to it, and is opened there."""

from __future__ import annotations

from typing import Any

import torch

from equilibra.rollout.m2n import MeshShape, Receiver, Sender, SharedMesh, SharedReceiver, SharedSender
from equilibra.rollout.m2n_cuda import DeviceReceiver, DeviceSender
from equilibra.rollout.m2n_gloo import GlooReceiver, GlooSender
from equilibra.rollout.memory import Memory, Where

__all__ = ["Ends"]


class Ends:
    """The buffers of an engine, as a worker finds them."""

    def __init__(self, shape: MeshShape, where: Where, address: str = "") -> None:
        """address: where processes find each other for gloo; empty: they share memory."""
        self.shape, self.where, self.address = shape, where, address
        self._mesh: SharedMesh | None = None
        self._end: Sender | Receiver | None = None
        self._process = 0

    @property
    def mesh(self) -> SharedMesh:
        if self._mesh is None:
            self._mesh = SharedMesh(Memory.open(self.where), self.shape)
        return self._mesh

    def sender(self, number: int, device: torch.device) -> Sender:
        """The end of an attention process; where there are GPUs, `connect` must follow."""
        end: Sender = self._made(number, number, device, (GlooSender, DeviceSender, SharedSender))
        return end

    def receiver(self, number: int, device: torch.device) -> Receiver:
        """The end of an expert process; where there are GPUs, `connect` must follow."""
        kinds = GlooReceiver, DeviceReceiver, SharedReceiver
        end: Receiver = self._made(self.shape.senders + number, number, device, kinds)
        return end

    def _made(self, process: int, number: int, device: torch.device, kinds: tuple[type[Any], ...]) -> Any:  # noqa: ANN401
        self._process, (gloo, on_gpu, shared) = process, kinds
        if self.address:
            self._end = gloo(self.mesh, number, self.address)
        else:
            self._end = on_gpu(self.mesh, number, device) if device.type == "cuda" else shared(self.mesh, number)
        return self._end

    def handle(self) -> Any:  # noqa: ANN401
        """What others need to open this worker's memory; None if all is in the segment."""
        return self._end.memory.handle() if isinstance(self._end, DeviceSender | DeviceReceiver) else None

    def connect(self, handles: list[Any]) -> None:
        """Open the other side's memory. handles: of all workers."""
        senders = self.shape.senders
        if isinstance(self._end, DeviceSender | DeviceReceiver):
            self._end.memory.open(handles[senders:] if isinstance(self._end, DeviceSender) else handles[:senders])

    def made_progress(self) -> None:
        """Count a pass, so that whoever waits sees that this process lives."""
        self.mesh.progress[self._process] += 1
