"""`equilibra verify`: the passes of one step of a run, with and without balancing, and how far they are apart."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from equilibra.cli import train

__all__ = ["add_parser"]

WORKER = "equilibra.train.verify:run_verify"


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="compare log-probabilities and gradients of a training run with and without balancing",
        usage="equilibra verify [section.key=value ...] [--config FILE] ...",
        description="Takes the options of equilibra train, generates the answers of one step, and runs its passes "
        "twice: as planned, and with static placement. Prints the differences beside what rounding in the run's dtype "
        "explains. Trains nothing. Exit code 1: they differ by more.",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options of equilibra train")
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file")
    parser.add_argument("--output", metavar="DIR", help="keep the run folder here; needed under torchrun")
    parser.add_argument("--planner", metavar="NAME", help="short for balance.planner=NAME")
    parser.add_argument("--seed", metavar="N", help="short for run.seed=N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, worker=WORKER, resume=None, steps=1, plain=True, options=False)


def run(arguments: argparse.Namespace) -> int:
    """Compare, then print the differences."""
    with TemporaryDirectory(prefix="equilibra-verify-") as folder:
        asked = train.asked_of(arguments, default=Path(folder) / "run")
        try:
            train.run_asked(asked, arguments)
        finally:
            if asked.lock is not None:
                asked.lock.close()
        if not asked.is_first:
            return 0
        return _say(asked.folder.path, as_json=arguments.json)


def _say(folder: Path, *, as_json: bool) -> int:
    from equilibra.integrations.differences import check, table
    from equilibra.train.verify import read_differences

    differences, about = read_differences(folder)
    if as_json:
        same = all(one.is_rounding for one in differences)
        rows = [asdict(one) for one in differences]
        print(json.dumps({**about, "differences": rows, "same": same}))
    else:
        print(
            f"\n{about['sequences']} sequences on {about['ranks']} ranks in {about['dtype']}: {about['planner']} "
            f"(slowest rank {about['imbalance']:.3f} times the mean) against static ({about['imbalance_static']:.3f})\n"
        )
        print(table(differences))
    check(differences)
    if not as_json:
        print("\nbalancing changes nothing but rounding")
    return 0
