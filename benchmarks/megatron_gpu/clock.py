"""Spans of a rank's work inside a step: the device's clock on a GPU, the host's without one.

`Spans.around` records a function's forward and backward pass: events are queued with the work, and nothing waits for
them before the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


class Spans:
    """Beginnings and ends of one kind of work, in the order it ran."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []

    def stamp(self) -> Any:  # noqa: ANN401 - an event, or a time
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, begin: Any, end: Any) -> None:  # noqa: ANN401
        self._pairs.append((begin, end))

    def around(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """`function(rows)`, with its forward pass and its backward pass recorded."""
        backward: list[Any] = []
        begin = self.stamp()
        rows = _Mark.apply(rows, self, lambda end: self.add(backward.pop(), end))  # type: ignore[no-untyped-call]
        out = function(rows)
        marked: Tensor = _Mark.apply(out, self, backward.append)  # type: ignore[no-untyped-call]
        self.add(begin, self.stamp())
        return marked

    def take_ms(self) -> list[float]:
        """Milliseconds of every span since the last call; the device must be idle."""
        pairs, self._pairs = self._pairs, []
        if self._device.type != "cuda":
            return [1e3 * (end - begin) for begin, end in pairs]
        return [float(begin.elapsed_time(end)) for begin, end in pairs]


class _Mark(torch.autograd.Function):
    """The identity; tells when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spans: Spans, tell: Callable[[Any], None]) -> Tensor:  # noqa: ANN401
        ctx.spans, ctx.tell = spans, tell
        same: Tensor = rows.view_as(rows)
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        ctx.tell(ctx.spans.stamp())
        return gradient, None, None
