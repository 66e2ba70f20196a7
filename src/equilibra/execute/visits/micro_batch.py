"""One rank's part of a micro-batch, ready to run: its tokens' routing, and every layer's tables when they are needed.

Symbols: T tokens of this rank in the micro-batch, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError, StaleError
from equilibra.core.plan import Stage
from equilibra.execute.visits.visit import NUMBER, Tables, Where

if TYPE_CHECKING:
    from equilibra.execute.runtime import Runtime

__all__ = ["MicroBatch"]


class MicroBatch:
    """Run the model's forward pass inside `with micro_batch:`, and its backward pass too."""

    def __init__(
        self, runtime: Runtime, *, stage: Stage, number: int, sequences: NDArray[np.int64],
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

    def where(self, layer: int) -> Where:
        """The visit of a layer."""
        return Where(stage=NUMBER[self.stage], micro_batch=self.number, layer=layer)

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
        """[T, K] recorded experts of a layer."""
        if layer not in self._experts:
            values = torch.from_numpy(self.experts_TLK[:, layer].astype(np.int64))
            pinned = values.pin_memory() if device.type == "cuda" else values
            self._experts[layer] = pinned.to(device, non_blocking=True)
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
