"""Progress on stderr: a bar on a terminal, plain lines elsewhere, nothing at all for work below a second."""

from __future__ import annotations

import sys
from time import monotonic

__all__ = ["Progress"]

WIDTH = 24


class Progress:
    """`step` before each part of the work, `close` at the end."""

    def __init__(self, *, quiet_s: float = 1.0) -> None:
        self._begin = monotonic()
        self._quiet_s = quiet_s
        self._drawn = False

    def step(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts are through, `what` comes next."""
        seconds = monotonic() - self._begin
        if seconds < self._quiet_s:
            return
        if sys.stderr.isatty():
            full = WIDTH * done // max(total, 1)
            bar = "█" * full + "░" * (WIDTH - full)
            print(f"\r\033[K{bar} {done}/{total} {what} {seconds:.0f} s", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(f"[{done}/{total}] {what} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
