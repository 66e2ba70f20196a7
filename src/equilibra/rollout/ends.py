"""How a worker gets its end of the M2N buffers: a value that travels to it, and is opened there."""

from __future__ import annotations

from typing import Any

import torch

from equilibra.rollout.m2n import MeshShape, Receiver, Sender, SharedMesh, SharedReceiver, SharedSender
from equilibra.rollout.memory import Memory, Where

__all__ = ["Ends"]


class Ends:
    """The buffers of an engine, as a worker finds them."""

    def __init__(self, shape: MeshShape, where: Where) -> None:
        self.shape, self.where = shape, where
        self._mesh: SharedMesh | None = None
        self._process = 0

    @property
    def mesh(self) -> SharedMesh:
        if self._mesh is None:
            self._mesh = SharedMesh(Memory.open(self.where), self.shape)
        return self._mesh

    def sender(self, number: int, device: torch.device) -> Sender:  # noqa: ARG002
        self._process = number
        return SharedSender(self.mesh, number)

    def receiver(self, number: int, device: torch.device) -> Receiver:  # noqa: ARG002
        self._process = self.shape.senders + number
        return SharedReceiver(self.mesh, number)

    def handles(self) -> Any:  # noqa: ANN401
        """What others need to open this worker's memory; None if all is in the segment."""
        return None

    def connect(self, handles: Any) -> None:  # noqa: ANN401
        """Open the others' memory."""

    def made_progress(self) -> None:
        self.mesh.progress[self._process] += 1
