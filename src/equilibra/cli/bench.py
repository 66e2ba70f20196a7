"""`equilibra bench`: the door to `benchmarks/`, which measures this package and is no part of the wheel.

The benches are found beside `src/`, so they run from any folder, but only where the package is a clone (`make setup`
installs it in place). Their options are their own (`benchmarks/command.py`): nothing of them is imported before then.
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
        add_help=False, prefix_chars="\0",  # all words are the benches', --help too
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Hand the words over to the benches of this clone."""
    root = Path(equilibra.__file__).resolve().parents[2]
    if not (root / COMMAND.replace(".", "/")).with_suffix(".py").is_file():
        raise InputError(
            "benches run from a clone of the repository, this is an installed package: git clone it, run `make setup` "
            "there, then .venv/bin/equilibra bench"
        )
    if sys.path[0] != str(root):  # first, as the current folder may have a benchmarks too; a bench's processes get it
        sys.path.insert(0, str(root))
    return int(import_module(COMMAND).main(arguments.words))
