"""One rank's part of a micro-batch: its tokens' routing, and the tables of its visits, made on demand.

Symbols: T tokens of this rank in the micro-batch, L layers, K experts per token, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError, StaleError
from equilibra.core.plan import GroupPlan
from equilibra.core.visit import ReceiveTable, SendTable, Stage, Visit, VisitKey
from equilibra.execute.experts.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """A visit as one rank executes it: sizes on the host, indices on the device."""

    visit: Visit
    sent_sizes: list[int]
    """rows to each rank"""
    received_sizes: list[int]
    """rows from each rank"""
    instance_sizes: list[int]
    """rows of this rank's homes, then standing copies, then flash copies"""
    num_homes: int
    num_standing: int
    sent_tokens: NDArray[np.int32]
    """[N sent] token of each row, on the host"""
    row_of_pair: Tensor
    """[T, K]"""
    received_of_grouped: Tensor | None
    """[N received]; None: already grouped"""
    grouped_of_received: Tensor | None
    """[N received]"""

    @cached_property
    def token_of_row(self) -> Tensor:
        """[N sent]; GPU kernels do not need it."""
        return to_device(self.sent_tokens, self.row_of_pair.device)

    @property
    def num_bytes(self) -> int:
        arrays = (self.sent_tokens, self.row_of_pair, self.received_of_grouped, self.grouped_of_received)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_rows(self) -> int:
        """(token, expert) pairs this rank computes."""
        return sum(self.instance_sizes)


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to a device without synchronising."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def on_device(visit: Visit, sent: SendTable, received: ReceiveTable, rank: int, device: torch.device) -> Tables:
    """Tables of one rank, copied without synchronising. A single rank makes rows in the order it computes them."""
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
    """What MicroBatch needs of the Runtime."""

    weights: list[ExpertWeights]
    current: MicroBatch | None
    armed: GroupPlan | None
    most_table_bytes: int


class MicroBatch:
    """Run the model's forward and backward pass inside `with micro_batch:`."""

    def __init__(
        self, runtime: Running, *, stage: Stage, number: int, sequences: NDArray[np.int64],
        experts_TLK: NDArray[np.integer], planned: bool,
    ) -> None:  # fmt: skip
        self.runtime, self.stage, self.number = runtime, stage, number
        self.sequences = sequences
        """this rank's sequences, in the order of their tokens"""
        self.experts_TLK = experts_TLK
        """recorded experts, -1 for tokens without recorded routing"""
        self.planned = planned
        """whether the routing is as planned on all ranks, so that sizes are known without an exchange"""
        self.rows: Tensor | None = None
        """positions of the tokens among padded hidden states; None: no padding"""
        self.table_bytes = 0
        """of the tables held now"""
        self._experts: dict[int, Tensor] = {}
        self._tables: dict[int, Tables] = {}
        self._armed = runtime.armed
        self._outer: list[MicroBatch | None] = []

    @property
    def num_tokens(self) -> int:
        return len(self.experts_TLK)

    def key(self, layer: int) -> VisitKey:
        return VisitKey(self.stage, self.number, layer)

    def __enter__(self) -> Self:
        self.check_armed()
        self._outer.append(self.runtime.current)
        self.runtime.current = self
        return self

    def check_armed(self) -> None:
        """Raise StaleError if another plan has been armed since."""
        if self.runtime.armed is not self._armed:
            raise StaleError(
                f"micro-batch {self.number} belongs to an earlier step, whose copies are gone; use micro-batches of "
                "the step that began last"
            )

    def __exit__(self, *_error: object) -> None:
        self.runtime.current = self._outer.pop()
        if self not in self._outer and self.runtime.current is not self:
            self._forget()

    def _forget(self) -> None:
        """Keep only the routing: training loops hold all micro-batches of a step, and a pass holds its own tables."""
        self._experts.clear()
        self._tables.clear()
        self.table_bytes = 0
        for weights in self.runtime.weights:
            weights.forget_homes()

    def experts(self, layer: int, device: torch.device) -> Tensor:
        """[T, K] recorded experts of a layer, in their narrow dtype."""
        if layer not in self._experts:
            self._experts[layer] = to_device(np.ascontiguousarray(self.experts_TLK[:, layer]), device)
            self._count(self._experts[layer].nbytes)
        return self._experts[layer]

    def tables(self, layer: int, make: Callable[[], Tables]) -> Tables:
        """The layer's tables, made once for forward, backward and activation recompute."""
        if layer not in self._tables:
            self._tables[layer] = make()
            self._count(self._tables[layer].num_bytes)
        return self._tables[layer]

    def _count(self, num_bytes: int) -> None:
        self.table_bytes += num_bytes
        self.runtime.most_table_bytes = max(self.runtime.most_table_bytes, self.table_bytes)

    def select(self, tokens_TD: Tensor) -> Tensor:
        """Pick this micro-batch's tokens from (padded) hidden states."""
        chosen = tokens_TD if self.rows is None else tokens_TD.index_select(0, self.rows)
        if chosen.shape[0] != self.num_tokens:
            raise InputError(
                f"micro-batch {self.number} has {self.num_tokens} tokens on this rank, the hidden states "
                f"{chosen.shape[0]}: pass the tokens of micro_batch.sequences in order, or set micro_batch.rows to "
                "their positions among padding"
            )
        return chosen

    def among_padding(self, out_TD: Tensor, hidden: Tensor) -> Tensor:
        """The inverse of `select`, with zeros for padding."""
        if self.rows is None:
            return out_TD
        return torch.zeros_like(hidden, dtype=out_TD.dtype).index_copy(0, self.rows, out_TD)
