"""Ctrl-C and SIGTERM as a count: the first one asks a run to end after its step, the second one at once.

A scheduler's SIGTERM may come twice: to every process, and again from the parent that passes it on (torchrun,
`timeout`). Those that follow within REPEAT_S are the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["REPEAT_S", "SIGNALS", "Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 2.0
"""in which further SIGTERMs count as the one before"""


class Interrupts:
    """Counts the signals of a `with` block, in the main thread."""

    def __init__(self, at_each: Callable[[int], None] = lambda _count: None) -> None:
        """`at_each` is called with the count, in the signal handler: it must be short."""
        self.count = 0
        self._terminated_at = float("-inf")
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

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._terminated_at = self._terminated_at, monotonic()
            if self._terminated_at - before < REPEAT_S:
                return
        self.count += 1
        self._at_each(self.count)
