"""Measured spans of this rank since the step began, in the schema of `equilibra.events`.

On GPUs, times are CUDA events read after the step, because the host queues work long before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from equilibra.core.visit import CopyList, VisitKey
from equilibra.events.schema import EVENT, Direction, Kind, Resource

Moment = float | torch.cuda.Event
"""seconds of perf_counter, or a timing event in a stream"""
Span = tuple[Moment, Moment]

ONCE_A_STEP = {
    Kind.PLAN, Kind.MIGRATION, Kind.STANDING_COPY, Kind.STANDING_GRADIENT, Kind.OPTIMIZER, Kind.REDUCE,
}  # fmt: skip


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record a timing event in a stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def direction_now() -> Direction:
    """FORWARD_AGAIN while the backward pass recomputes activations, else FORWARD."""
    inside_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public name for it
    return Direction.FORWARD_AGAIN if inside_backward else Direction.FORWARD


class Recorder:
    """Collects the spans of a step on this rank."""

    def __init__(
        self, rank: int, *, on: bool = True,
        finish: Callable[[torch.cuda.Event, str], None] = lambda event, _what: event.synchronize(),
    ) -> None:  # fmt: skip
        """finish: blocks the host until an event."""
        self.rank, self.on, self._finish = rank, on, finish
        self._rows: list[tuple[tuple[int, ...], Moment, Moment]] = []
        self.began = perf_counter()
        self._began_on_gpu: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        """the GPU that computes; None on the host"""
        self.dense_since: Moment | None = None
        """end of the last MoE layer: until the next one, attention and other dense parts run"""

    def begin_step(self, device: torch.device | None = None) -> None:
        """Start the clock; ranks call it together. device: the GPU that computes, if any."""
        self._rows.clear()
        self._device, self._began_on_gpu = device, None
        if device is not None and self.on:
            stream = torch.cuda.current_stream(device)
            self._finish(stream.record_event(), "beginning the step")  # both clocks start together
            self._began_on_gpu = mark(stream)
        self.began = perf_counter()
        self.dense_since = None

    def now(self) -> Moment:
        """A moment on the clock of what computes: the current stream, or the host."""
        if self.on and self._began_on_gpu is not None:
            return mark(torch.cuda.current_stream(self._device))
        return perf_counter()

    @contextmanager
    def span(
        self, kind: Kind, resource: Resource, key: VisitKey, direction: Direction, *, tokens: int = 0,
        num_bytes: int = 0,
    ) -> Iterator[None]:  # fmt: skip
        start = self.now()
        try:
            yield
        finally:
            self.add(kind, resource, key, direction, start, self.now(), tokens=tokens, num_bytes=num_bytes)

    def add(
        self, kind: Kind, resource: Resource, key: VisitKey, direction: Direction, start: Moment, end: Moment, *,
        tokens: int = 0, num_bytes: int = 0, peer: int = -1, expert: int = -1,
    ) -> None:  # fmt: skip
        """Record a span that is finished or queued."""
        if self.on and (key.micro_batch >= 0 or kind in ONCE_A_STEP):  # not live routing between steps
            about = (
                kind, resource, key.stage.number, direction, key.layer, key.micro_batch, self.rank, peer, expert,
                tokens, num_bytes,
            )  # fmt: skip
            self._rows.append((about, start, end))

    def moved(
        self, kind: Kind, resource: Resource, key: VisitKey, span: Span, copies: CopyList, *, num_bytes: int
    ) -> None:
        """Record one event per copy held here that has arrived, or whose gradient has returned."""
        direction = Direction.BACKWARD if kind in (Kind.FLASH_GRADIENT, Kind.STANDING_GRADIENT) else Direction.FORWARD
        for expert, peer in zip(copies.held_expert.tolist(), copies.held_origin.tolist(), strict=True):
            self.add(kind, resource, key, direction, *span, num_bytes=num_bytes, peer=peer, expert=expert)

    def taken(self) -> NDArray[np.void]:
        for _, *span in self._rows:
            for moment in span:
                if not isinstance(moment, float):
                    self._finish(moment, "finishing the step")
        rows = np.array([(*about, self._us(start), self._us(end)) for about, start, end in self._rows], EVENT)
        self._rows = []
        return rows

    def _us(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return max(moment - self.began, 0.0) * 1e6
        assert self._began_on_gpu is not None
        return max(float(self._began_on_gpu.elapsed_time(moment)), 0.0) * 1e3
