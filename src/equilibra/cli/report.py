"""`equilibra report`: turn a run folder into one HTML page or a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from equilibra.core.errors import InputError

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser(
        "report",
        help="turn a run into one self-contained HTML page",
        description="Reads a run folder (of `equilibra simulate`) and writes one self-contained HTML file: the gain, "
        "heat maps, every copy, the timeline, memory. --perfetto writes a trace for ui.perfetto.dev.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("--output", metavar="FILE.html", help="the page (RUN.html, unless only --perfetto is given)")
    parser.add_argument("--perfetto", metavar="FILE.json", help="write the timeline of one planner as a trace")
    parser.add_argument("--planner", metavar="NAME", help="with --perfetto: whose timeline (equilibra)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and the trace."""
    from equilibra.events.run import load_run
    from equilibra.report.page import write_report
    from equilibra.report.timeline import write_perfetto

    if arguments.planner is not None and arguments.perfetto is None:
        raise InputError("--planner goes with --perfetto: it says whose timeline to write")
    folder = Path(arguments.folder)
    loaded = load_run(folder)
    if arguments.perfetto is not None:
        path = Path(arguments.perfetto)
        write_perfetto(loaded, path, planner=arguments.planner, overwrite=arguments.overwrite)
        print(f"wrote {path}; open it in ui.perfetto.dev", file=sys.stderr)
    if arguments.output is not None or arguments.perfetto is None:
        name = folder.resolve().name + ".html"
        path = Path(arguments.output) if arguments.output is not None else folder.resolve().parent / name
        write_report(loaded, path, overwrite=arguments.overwrite)
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser", file=sys.stderr)
    return 0
