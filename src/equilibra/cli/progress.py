"""Progress on stderr: a bar on a terminal, plain lines elsewhere, nothing at all for work below a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

__all__ = ["Progress", "announced"]

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


@contextmanager
def announced(work: str) -> Iterator[None]:
    """Say what is going on, if it takes longer than a second, and how long it took."""
    start = monotonic()
    timer = threading.Timer(1.0, lambda: print(f"{work} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if monotonic() - start > 1.0:
        print(f"{work}: {monotonic() - start:.1f} s", file=sys.stderr)
