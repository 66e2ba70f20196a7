"""`equilibra doctor`: check and measure this machine, and say which transfer paths work on it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equilibra
from equilibra.cli.arguments import Progress, check_target, named_like, positive
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.doctor.finding import Examination

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check and measure this machine, and say which transfer paths work on it",
        description="Checks software, GPUs, links and memory, measures them, and says which transfer paths work. Exit "
        "code 0 if at least one works, 1 if none, 2 for bad input.",
    )
    parser.add_argument("--model", metavar="NAME", help="preset, .toml or config.json: is /dev/shm enough for it?")
    parser.add_argument("--spare-slots", type=positive, default=2, metavar="S", help="flash copies a rank can hold (2)")
    parser.add_argument("--ranks-per-node", type=positive, metavar="G", help="ranks on this machine (its GPUs)")
    parser.add_argument("--no-measure", action="store_true", help="only check, which saves a few seconds")
    parser.add_argument("--write", metavar="FILE.toml", help="write its prices, for --hardware and balance.hardware")
    parser.add_argument("--force", "--overwrite", action="store_true", help="replace --write's file if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine, print the findings, write the file."""
    from equilibra.doctor.finding import Ask, PathState, as_table, as_text
    from equilibra.doctor.node import examine

    _check(arguments)
    ask = Ask(**named_like(Ask, arguments))
    progress = Progress()
    tell = progress.step if sys.stderr.isatty() else lambda *_: None  # a line for each short job would be noise
    try:
        found = examine(ask, measure=not arguments.no_measure, tell=tell)
    finally:
        progress.close()
    if arguments.json:
        about = {"command": "equilibra " + shlex.join(sys.argv[1:]), "version": equilibra.__version__,
                 "date": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
        print(json.dumps({**about, **as_table(found)}))
    else:
        print(as_text(found))
    sys.stdout.flush()
    if arguments.write:
        _write(found, Path(arguments.write), overwrite=arguments.force)  # last: a full disk must not cost the answer
    return 0 if any(one.state is PathState.WORKS for one in found.verdicts) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuse early what would fail after the measurements."""
    if arguments.model is not None:
        from equilibra.cost.presets import load_model

        load_model(arguments.model)
    if arguments.write is None:
        if arguments.force:
            raise InputError("--force goes with --write: it replaces that file")
        return
    if arguments.no_measure:
        raise InputError("--write needs measurements: leave out --no-measure")
    if Path(arguments.write).suffix != ".toml":
        raise InputError(f"cannot write {arguments.write}: hardware files end in .toml")
    check_target(arguments.write, overwrite=arguments.force, option="--force")


def _write(found: Examination, path: Path, *, overwrite: bool) -> None:
    from equilibra.core.atomic import atomic_file
    from equilibra.cost.presets import prices_toml
    from equilibra.doctor.measure import preset_of

    preset = preset_of(found.findings, found.measured, name=path.stem.lower())
    with atomic_file(path, overwrite=overwrite) as part:
        part.write_text(prices_toml(preset.hardware))
    print(
        f"wrote {path}: {', '.join(preset.measured)} from this machine, the rest from {preset.base}\n"
        f"use it with: equilibra simulate --hardware {path}, or equilibra train balance.hardware={path}",
        file=sys.stderr,
    )
