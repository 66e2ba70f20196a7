"""Ctrl-C and SIGTERM as a count: the first one asks a run to end after its step, the second one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts the signals of a `with` block, in the main thread."""

    def __init__(self, at_each: Callable[[int], None] = lambda _count: None) -> None:
        """`at_each` is called with the count, in the signal handler: it must be short."""
        self.count = 0
        self._at_each = at_each
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._at_each(self.count)
