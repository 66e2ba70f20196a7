"""The collective path: flash copies by all-to-all inside the node. Works on gloo and NCCL, between any ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from equilibra.core.visit import CopyList
from equilibra.execute.copies.transfer import Copied, TransferEngine
from equilibra.execute.group import Channel, ExpertGroup, Pending, Ready, Then

__all__ = ["CollectiveEngine", "Staging"]


class CollectiveEngine(TransferEngine):
    """Reads weights when they are fetched, so they are always of the current version."""

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
