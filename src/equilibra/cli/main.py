"""`equilibra`: reads the command line and runs one command. Commands import heavy libraries only when they run.

`bench` runs `benchmarks/`, which measures this package and is not part of the wheel. It needs a clone (`make setup`
installs it in place) but runs from any folder; the benches parse their own options (`benchmarks/command.py`).

Exit codes: 0 done; 1 our defect (doctor: no transfer path works; verify: more than rounding); 2 unusable input, named
in one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import equilibra
from equilibra.cli import machine, plan, rollout, simulate, trace, train
from equilibra.core.errors import EquilibraError, InputError

BENCH = "benchmarks.command"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)  # like Ctrl-C: no half-written file stays
    try:
        parsed = _parsed(arguments)
        return int(parsed.run(parsed))
    except InputError as error:
        print(f"equilibra: {error}", file=sys.stderr)
        return 2
    except EquilibraError as error:
        print(f"equilibra: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("equilibra: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        print("equilibra: out of memory; use a smaller input, or fewer at a time", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: not an error
        return 0


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="equilibra", description=equilibra.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"equilibra {equilibra.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        train.add_train, train.add_verify, simulate.add_simulate, simulate.add_report, plan.add_parser,
        rollout.add_parser, trace.add_parser, machine.add_calibrate, machine.add_doctor,
    ):  # fmt: skip
        add(commands)
    bench = commands.add_parser(
        "bench",
        help="measure the planner, the runtime, whole training steps and a GPU; replay the papers' tables (in a clone)",
        add_help=False, prefix_chars="\0",  # the benches parse everything, even --help
    )  # fmt: skip
    bench.add_argument("words", nargs=argparse.REMAINDER)
    bench.set_defaults(run=_bench)
    parsed, rest = parser.parse_known_args(arguments)
    if rest and all("=" in word and not word.startswith("-") for word in rest) and hasattr(parsed, "overrides"):
        parsed.overrides += rest  # argparse takes only adjacent ones
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def _bench(arguments: argparse.Namespace) -> int:
    root = Path(equilibra.__file__).resolve().parents[2]
    if not (root / BENCH.replace(".", "/")).with_suffix(".py").is_file():
        raise InputError(
            "benches need a clone of the repository, but this is an installed package: git clone it, run `make setup` "
            "there, then .venv/bin/equilibra bench"
        )
    if sys.path[0] != str(root):  # first: the current folder may have a benchmarks too
        sys.path.insert(0, str(root))
    return int(import_module(BENCH).main(arguments.words))
