"""`equilibra`: one file per subcommand, which imports heavy libraries only when it runs.

Exit codes: 0 done, 1 our defect (doctor: no transfer path works), 2 unusable input (one line on stderr), 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import equilibra
from equilibra.cli import bench, calibrate, doctor, plan, report, rollout, simulate, trace, train, verify
from equilibra.core.errors import EquilibraError, InputError

__all__ = ["main"]


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


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="equilibra", description=equilibra.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"equilibra {equilibra.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (train, verify, simulate, report, plan, rollout, trace, calibrate, doctor, bench):
        command.add_parser(commands)
    parsed, rest = parser.parse_known_args(arguments)
    if rest and all("=" in word and not word.startswith("-") for word in rest) and hasattr(parsed, "overrides"):
        parsed.overrides += rest  # argparse takes only adjacent ones
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
