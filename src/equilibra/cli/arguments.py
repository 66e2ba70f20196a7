"""What several commands share: argument types, and progress on stderr."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

__all__ = ["Progress", "add_cluster", "announced", "positive"]

WIDTH = 24


def positive(text: str) -> int:
    """Argument type: a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return value


def add_cluster(parser: argparse.ArgumentParser, *, nodes: int = 1, ranks_per_node: int = 8) -> None:
    """Add --nodes and --ranks-per-node."""
    parser.add_argument("--nodes", type=positive, default=nodes, metavar="N", help=f"nodes ({nodes})")
    parser.add_argument("--ranks-per-node", type=positive, default=ranks_per_node, metavar="G",
                        help=f"ranks per node ({ranks_per_node})")  # fmt: skip


class Progress:
    """A bar on a terminal, plain lines elsewhere, nothing for work below a second."""

    def __init__(self, *, quiet_s: float = 1.0) -> None:
        self._begin = monotonic()
        self._quiet_s = quiet_s
        self._drawn = False

    def step(self, what: str, done: int, total: int) -> None:
        """Report that `done` of `total` parts are finished and `what` is next."""
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
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def announced(work: str) -> Iterator[None]:
    """Announce work that takes longer than a second, and how long it took."""
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
