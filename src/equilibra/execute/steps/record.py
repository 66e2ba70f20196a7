"""What really happened, in the schema of `measure.events`: spans of this rank since the step began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from equilibra.execute.visits.visit import Where
from equilibra.measure.events import EVENT, Direction, Kind, Resource

__all__ = ["Recorder"]


ONCE_A_STEP = {
    Kind.PLAN, Kind.MIGRATION, Kind.STANDING_COPY, Kind.STANDING_GRADIENT, Kind.OPTIMIZER, Kind.REDUCE,
}  # fmt: skip


class Recorder:
    """Collects spans; a step's worth of them is taken away at its end."""

    def __init__(self, rank: int, *, on: bool = True) -> None:
        self.rank, self.on = rank, on
        self._rows: list[tuple[int | float, ...]] = []
        self.began = perf_counter()
        """when the step began"""
        self.dense_since: float | None = None
        """when the last MoE layer was left: what follows until the next one is attention and other dense parts"""

    def begin_step(self) -> None:
        """Times are counted from here; ranks call it together."""
        self._rows.clear()
        self.began = perf_counter()
        self.dense_since = None

    @contextmanager
    def span(
        self, kind: Kind, resource: Resource, where: Where, direction: Direction, *, tokens: int = 0, num_bytes: int = 0
    ) -> Iterator[None]:
        """Record what runs inside."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(kind, resource, where, direction, start, perf_counter(), tokens=tokens, num_bytes=num_bytes)

    def add(
        self, kind: Kind, resource: Resource, where: Where, direction: Direction, start: float, end: float, *,
        tokens: int = 0, num_bytes: int = 0, peer: int = -1, expert: int = -1,
    ) -> None:  # fmt: skip
        """Record a span that is over; times are of perf_counter."""
        if self.on and (where.micro_batch >= 0 or kind in ONCE_A_STEP):  # not what is routed live between steps
            begin = self.began
            self._rows.append((
                kind, resource, where.stage, direction, where.layer, where.micro_batch, self.rank, peer, expert,
                tokens, num_bytes, max(start - begin, 0.0) * 1e6, max(end - begin, 0.0) * 1e6,
            ))  # fmt: skip

    def moved(
        self, kind: Kind, resource: Resource, where: Where, start: float, experts: NDArray[np.int32],
        peers: NDArray[np.int32], *, num_bytes: int,
    ) -> None:  # fmt: skip
        """Record experts that were seen to have arrived now, one event each; where a rank has none, nothing."""
        end = perf_counter()
        direction = Direction.BACKWARD if kind in (Kind.FLASH_GRADIENT, Kind.STANDING_GRADIENT) else Direction.FORWARD
        for expert, peer in zip(experts.tolist(), peers.tolist(), strict=True):
            self.add(kind, resource, where, direction, start, end, num_bytes=num_bytes, peer=peer, expert=expert)

    def taken(self) -> NDArray[np.void]:
        """The rows so far; none are kept."""
        rows = np.array(self._rows, EVENT)
        self._rows = []
        return rows
