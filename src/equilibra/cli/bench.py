"""`equilibra bench`: measure, print, and write results files with the command and machine that made them."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibra.bench.suite import Suite

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser("bench", help="measure the planner; replay the papers' tables")
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, text, details in (
        (
            "planner",
            "balance, copies and time of the planner, beside what it must reach",
            "Sections that need routing recordings are left out without --traces (or $EQUILIBRA_TRACES).",
        ),
        (
            "paper",
            "the papers' tables, simulated, with the papers' figures beside ours",
            "Routing is synthetic, its skew fitted to a recording: gpt-oss-20b.npz in --traces, or the fit kept here.",
        ),
    ):
        bench = benches.add_parser(name, help=text, description=details)
        bench.add_argument("--traces", metavar="DIR", help="folder with gpt-oss-20b.npz and the dsv2-lite recordings")
        bench.add_argument("--only", metavar="SECTION", action="append", help="run this section only (may be repeated)")
        bench.add_argument("--quick", action="store_true", help="small and few: to see that it runs, not to report")
        bench.add_argument("--output", metavar="DIR", help=f"write {name}.json, {name}.md and pictures there")
        bench.add_argument("--json", action="store_true", help="print one JSON object")
        bench.set_defaults(run=run, suite=name)


def run(arguments: argparse.Namespace) -> int:
    """Run the sections of a suite."""
    from equilibra.bench.problems import traces_folder
    from equilibra.bench.render import earlier_results, markdown, plain, write_results
    from equilibra.bench.setting import Setting
    from equilibra.bench.suite import environment, run_sections
    from equilibra.core.errors import InputError

    suite = _suite(arguments.suite)
    names = arguments.only or list(suite.sections)
    unknown = [name for name in names if name not in suite.sections]
    if unknown:
        raise InputError(f"no section is named {unknown[0]!r}; use some of {', '.join(suite.sections)}")
    traces = traces_folder(arguments.traces)
    left_out = [name for name in names if name in suite.need_traces and traces is None]
    if left_out:
        print(f"left out, no --traces: {', '.join(left_out)}", file=sys.stderr)
    for name, module in suite.need_modules.items():
        if name in names and find_spec(module) is None:
            print(f"left out, no {module} (pip install 'equilibra[bench]'): {name}", file=sys.stderr)
            left_out.append(name)
    if arguments.output and not Path(arguments.output).is_dir():
        raise InputError(f"there is no folder {arguments.output}; create it first")
    if arguments.output:
        earlier_results(suite, Path(arguments.output))
    setting = Setting(traces=traces, quick=arguments.quick)
    result: dict[str, Any] = {"left_out": left_out, "sections": {}}
    about = {"command": f"equilibra bench {suite.name}" + " --quick" * arguments.quick, "measured_on": environment()}
    if traces is not None:
        about["command"] += " --traces DIR"
    chosen = [name for name in names if name not in left_out]
    for name, rows in run_sections(suite, setting, chosen, lambda line: print(line, file=sys.stderr, flush=True)):
        result["sections"][name] = {**about, "rows": plain(rows)}
    if arguments.output:
        write_results(suite, result, Path(arguments.output))
    print(json.dumps(result) if arguments.json else markdown(suite, result))
    return 0


def _suite(name: str) -> Suite:
    if name == "planner":
        from equilibra.bench.planner import PLANNER

        return PLANNER
    from equilibra.bench.paper import PAPER

    return PAPER
