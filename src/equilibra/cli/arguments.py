"""What commands share: argument types, early checks of files to write, and progress on stderr."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from time import monotonic
from typing import Any

from equilibra.core.errors import InputError

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


def number(
    parser: argparse._ActionsContainer,
    option: str,
    default: float,
    metavar: str,
    text: str,
    *,
    kind: Callable[[str], float] = positive,
) -> None:
    """Add an option that takes a number; its help is `text` with the default behind it."""
    parser.add_argument(option, type=kind, default=default, metavar=metavar, help=f"{text} ({default})")


def add_cluster(parser: argparse.ArgumentParser, *, ranks_per_node: int | None = 8) -> None:
    """Add --nodes and --ranks-per-node, named as in `Cluster`; ranks_per_node None: those of the hardware."""
    parser.add_argument("--nodes", dest="num_nodes", type=positive, default=1, metavar="N", help="nodes (1)")
    parser.add_argument("--ranks-per-node", type=positive, default=ranks_per_node, metavar="G",
                        help=f"ranks per node ({ranks_per_node or 'as many as the hardware has'})")  # fmt: skip


def named_like(kind: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that are named like fields of a dataclass."""
    return {one.name: getattr(arguments, one.name) for one in fields(kind) if hasattr(arguments, one.name)}


def check_target(path: str, *, overwrite: bool, option: str = "--overwrite", folder: bool = False) -> None:
    """Refuse, before the work, a file or run folder that could not be written after it."""
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {target.parent} does not exist")
    if target.is_dir() and not folder:
        raise InputError(f"cannot write {path}: it is a folder; give the name of a file")
    if target.exists() and not overwrite:
        raise InputError(f"cannot write {path}: it exists; choose another name, or replace it with {option}")
    if target.exists() and folder and not (target / "run.json").is_file():
        raise InputError(f"cannot overwrite {path}: not a run folder (no run.json)")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write {path}: no permission to write to the folder {target.parent}")


class Progress:
    """Progress on stderr: a bar on a terminal, lines elsewhere, nothing for the first second."""

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
    """Announce work that takes longer than a second, and report how long it took."""
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
