"""One rank's part of a micro-batch, ready to run: its tokens' routing, and every visit's tables when they are needed.

Symbols: T tokens of this rank in the micro-batch, L layers, K experts per token, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError, StaleError
from equilibra.core.plan import GroupPlan
from equilibra.core.visit import ReceiveTable, SendTable, Stage, Visit, VisitKey
from equilibra.execute.experts.weights import ExpertWeights

__all__ = ["MicroBatch", "Tables", "on_device", "to_device"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """A visit on one rank: sizes on the host, indices on the device."""

    visit: Visit
    """of all ranks"""
    sent_sizes: list[int]
    """rows to each rank"""
    received_sizes: list[int]
    """rows from each rank"""
    instance_sizes: list[int]
    """rows of each of this rank's instances: homes, standing copies, flash copies"""
    num_homes: int
    """instances that are homes"""
    num_standing: int
    """instances that are standing copies; they follow the homes"""
    sent_tokens: NDArray[np.int32]
    """[N sent] on the host: the token of each row"""
    row_of_pair: Tensor
    """[T, K]"""
    received_of_grouped: Tensor | None
    """[N received]; None: they are in this order already"""
    grouped_of_received: Tensor | None
    """[N received]"""

    @cached_property
    def token_of_row(self) -> Tensor:
        """[N sent]; kernels on GPUs do without it."""
        return to_device(self.sent_tokens, self.row_of_pair.device)

    @property
    def num_bytes(self) -> int:
        """Of the arrays, on host and device."""
        arrays = (self.sent_tokens, self.row_of_pair, self.received_of_grouped, self.grouped_of_received)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_rows(self) -> int:
        """Pairs this rank computes."""
        return sum(self.instance_sizes)


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on a device, without waiting for it."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def on_device(visit: Visit, sent: SendTable, received: ReceiveTable, rank: int, device: torch.device) -> Tables:
    """Tables of one rank; index arrays go to the device without waiting for it.

    A rank that is alone sends nothing: its rows are made in the order in which they are computed.
    """
    alone = visit.num_ranks == 1
    return Tables(
        visit=visit,
        sent_sizes=sent.counts_RE.sum(axis=1).tolist(),
        received_sizes=received.size_of_source.tolist(),
        instance_sizes=received.size_of_instance.tolist(),
        num_homes=int((visit.home_of_expert == rank).sum()),
        num_standing=int((visit.standing_rank == rank).sum()),
        sent_tokens=sent.token_of_row[received.received_of_grouped] if alone else sent.token_of_row,
        row_of_pair=to_device(received.grouped_of_received[sent.row_of_pair] if alone else sent.row_of_pair, device),
        received_of_grouped=None if alone else to_device(received.received_of_grouped, device),
        grouped_of_received=None if alone else to_device(received.grouped_of_received, device),
    )


class Running(Protocol):
    """What runs micro-batches: the Runtime."""

    current: MicroBatch | None
    most_table_bytes: int

    @property
    def weights(self) -> Sequence[ExpertWeights]: ...

    @property
    def armed(self) -> GroupPlan | None: ...


class MicroBatch:
    """Run the model's forward pass inside `with micro_batch:`, and its backward pass too."""

    def __init__(
        self, runtime: Running, *, stage: Stage, number: int, sequences: NDArray[np.int64],
        experts_TLK: NDArray[np.integer], planned: bool,
    ) -> None:  # fmt: skip
        self.runtime, self.stage, self.number = runtime, stage, number
        self.sequences = sequences
        """numbers of this rank's sequences, in the order of their tokens"""
        self.experts_TLK = experts_TLK
        """recorded experts, -1 for tokens without recorded routing"""
        self.planned = planned
        """whether all ranks have the routing that was planned for: sizes are known, nothing is exchanged"""
        self.rows: Tensor | None = None
        """where this micro-batch's tokens are in the hidden states, if those hold padding too; else all of them"""
        self.table_bytes = 0
        """of the tables that it holds now"""
        self._experts: dict[int, Tensor] = {}
        self._tables: dict[int, Tables] = {}
        self._armed = runtime.armed
        self._outer: list[MicroBatch | None] = []

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.experts_TLK)

    def key(self, layer: int) -> VisitKey:
        """The visit of a layer."""
        return VisitKey(self.stage, self.number, layer)

    def __enter__(self) -> Self:
        self.check_armed()
        self._outer.append(self.runtime.current)
        self.runtime.current = self
        return self

    def check_armed(self) -> None:
        """An error if another plan has been armed since."""
        if self.runtime.armed is not self._armed:
            raise StaleError(
                f"micro-batch {self.number} is of a step that is over: its copies are gone; take micro-batches of the "
                "step that began last"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runtime.current = self._outer.pop()
        if self not in self._outer and self.runtime.current is not self:
            self._forget()

    def _forget(self) -> None:
        """Loops hold all micro-batches of a step: one that does not run keeps nothing but its routing.

        A pass whose backward comes later holds the tables it needs itself; recompute makes them again.
        """
        self._experts.clear()
        self._tables.clear()
        self.table_bytes = 0
        for weights in self.runtime.weights:
            weights.forget_homes()

    def experts(self, layer: int, device: torch.device) -> Tensor:
        """[T, K] recorded experts of a layer, in their narrow type."""
        if layer not in self._experts:
            self._experts[layer] = to_device(np.ascontiguousarray(self.experts_TLK[:, layer]), device)
            self._count(self._experts[layer].nbytes)
        return self._experts[layer]

    def tables(self, layer: int, make: Callable[[], Tables]) -> Tables:
        """The layer's tables, made once: the same in forward, backward and recompute."""
        if layer not in self._tables:
            self._tables[layer] = make()
            self._count(self._tables[layer].num_bytes)
        return self._tables[layer]

    def _count(self, num_bytes: int) -> None:
        self.table_bytes += num_bytes
        self.runtime.most_table_bytes = max(self.runtime.most_table_bytes, self.table_bytes)

    def select(self, tokens_TD: Tensor) -> Tensor:
        """The tokens of this micro-batch among hidden states."""
        chosen = tokens_TD if self.rows is None else tokens_TD.index_select(0, self.rows)
        if chosen.shape[0] != self.num_tokens:
            raise InputError(
                f"micro-batch {self.number} has {self.num_tokens} tokens on this rank, the hidden states "
                f"{chosen.shape[0]}: give the layer the tokens of micro_batch.sequences in their order, or set "
                "micro_batch.rows to where they are among padding"
            )
        return chosen

    def among_padding(self, out_TD: Tensor, hidden: Tensor) -> Tensor:
        """The inverse of `select`: results at their tokens' places in the hidden states, zeros for padding."""
        if self.rows is None:
            return out_TD
        return torch.zeros_like(hidden, dtype=out_TD.dtype).index_copy(0, self.rows, out_TD)
