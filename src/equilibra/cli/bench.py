"""`equilibra bench`: runs `benchmarks/`, which measures this package and is not part of the wheel.

The benches are beside `src/`, so they need a clone (`make setup` installs it in place) but run from any folder. They
parse their own options (`benchmarks/command.py`).
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import equilibra
from equilibra.core.errors import InputError

__all__ = ["add_parser"]

COMMAND = "benchmarks.command"


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure the planner, the runtime, whole training steps and a GPU; replay the papers' tables (in a clone)",
        add_help=False, prefix_chars="\0",  # the benches parse everything, even --help
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pass the words on to the benches of this clone."""
    root = Path(equilibra.__file__).resolve().parents[2]
    if not (root / COMMAND.replace(".", "/")).with_suffix(".py").is_file():
        raise InputError(
            "benches need a clone of the repository, but this is an installed package: git clone it, run `make setup` "
            "there, then .venv/bin/equilibra bench"
        )
    if sys.path[0] != str(root):  # first: the current folder may have a benchmarks too
        sys.path.insert(0, str(root))
    return int(import_module(COMMAND).main(arguments.words))
