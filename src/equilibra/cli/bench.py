"""`equilibra bench`: measure, print, and write results files with the command and machine that made them."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser("bench", help="measure the planner on this machine")
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    planner = benches.add_parser(
        "planner",
        help="balance, copies and time of the planner, beside what it must reach",
        description="Sections that need routing recordings are left out without --traces (or $EQUILIBRA_TRACES).",
    )
    planner.add_argument("--traces", metavar="DIR", help="folder with gpt-oss-20b.npz and the dsv2-lite recordings")
    planner.add_argument("--only", metavar="SECTION", action="append", help="run this section only (may be repeated)")
    planner.add_argument("--quick", action="store_true", help="few repeats: to see that it runs, not to report")
    planner.add_argument("--output", metavar="DIR", help="write planner.json, planner.md and planner-growth.png there")
    planner.add_argument("--json", action="store_true", help="print one JSON object")
    planner.set_defaults(run=run_planner)


def run_planner(arguments: argparse.Namespace) -> int:
    """Run the planner bench."""
    from equilibra.bench.planner import NEED_TRACES, SECTIONS, Setting, environment, run_sections
    from equilibra.bench.problems import traces_folder
    from equilibra.bench.render import earlier_results, markdown, plain, write_results
    from equilibra.core.errors import InputError

    names = arguments.only or list(SECTIONS)
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise InputError(f"no section is named {unknown[0]!r}; use some of {', '.join(SECTIONS)}")
    traces = traces_folder(arguments.traces)
    left_out = [name for name in names if name in NEED_TRACES and traces is None]
    if left_out:
        print(f"left out, no --traces: {', '.join(left_out)}", file=sys.stderr)
    if "exact_small" in names and find_spec("scipy") is None:
        print("left out, no scipy (pip install 'equilibra[bench]'): exact_small", file=sys.stderr)
        left_out.append("exact_small")
    if arguments.output and not Path(arguments.output).is_dir():
        raise InputError(f"there is no folder {arguments.output}; create it first")
    if arguments.output:
        earlier_results(Path(arguments.output))
    setting = Setting(traces=traces, quick=arguments.quick)
    result: dict[str, Any] = {"left_out": left_out, "sections": {}}
    about = {"command": "equilibra bench planner" + " --quick" * arguments.quick, "measured_on": environment()}
    if traces is not None:
        about["command"] += " --traces DIR"
    chosen = [name for name in names if name not in left_out]
    for name, rows in run_sections(setting, chosen, lambda line: print(line, file=sys.stderr, flush=True)):
        result["sections"][name] = {**about, "rows": plain(rows)}
    if arguments.output:
        write_results(result, Path(arguments.output))
    print(json.dumps(result) if arguments.json else markdown(result))
    return 0
