"""Arguments that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["add_cluster", "positive"]


def positive(text: str) -> int:
    """A whole number above 0."""
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
    parser.add_argument(
        "--ranks-per-node",
        type=positive,
        default=ranks_per_node,
        metavar="G",
        help=f"ranks per node ({ranks_per_node})",
    )
