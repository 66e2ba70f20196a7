"""`equilibra bench`: measure, print, and write results files with the command and machine that made them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.command import add_gpu
from equilibra.cli.arguments import positive

if TYPE_CHECKING:
    from benchmarks.suite import Suite

TRAIN_NUMBERS = {
    "repeats": "timed rounds of all contenders (5)",
    "prompts": "problems of a step, on both ranks together (12)",
    "answers": "answers to each (8)",
    "answer_tokens": "longest answer (128)",
    "hidden": "width of a token, a multiple of 64 (256)",
    "ffn": "inner width of an expert (1024)",
    "experts": "experts of a layer (16)",
    "layers": "MoE layers (4)",
    "mini_batches": "optimizer steps of a step (2)",
    "tokens_per_rank": "token budget of a rank's part of a micro-batch (1024)",
    "spare_slots": "flash copies a rank can hold (2)",
}
"""options of `bench train` that are whole numbers"""


def main(words: Sequence[str]) -> int:
    """Run one bench; returns the exit code."""
    parsed = _parser().parse_args(words)
    return int(parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="equilibra bench",
        description="Measure the planner, the runtime, whole training steps and a GPU; replay the papers' tables.",
    )
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, text, details in (
        (
            "planner",
            "balance, copies and time of the planner, beside its requirements",
            "Sections that need routing recordings are left out without --traces (or $EQUILIBRA_TRACES).",
        ),
        (
            "paper",
            "the papers' tables, simulated, with the papers' figures beside ours",
            "Routing is synthetic, with skew fitted to a recording: gpt-oss-20b.npz in --traces, or the stored fit.",
        ),
    ):
        bench = benches.add_parser(name, help=text, description=details)
        bench.add_argument("--traces", metavar="DIR", help="folder with gpt-oss-20b.npz and the dsv2-lite recordings")
        bench.add_argument("--only", metavar="SECTION", action="append", help="run this section only (may be repeated)")
        bench.add_argument("--quick", action="store_true", help="a small run, to see that it works; not for reporting")
        bench.add_argument("--output", metavar="DIR", help=f"write {name}.json, {name}.md and pictures there")
        bench.add_argument("--json", action="store_true", help="print one JSON object")
        bench.set_defaults(run=run, suite=name)
    _add_runtime(benches)
    _add_train(benches)
    add_gpu(benches)
    return parser


def _add_runtime(benches: Any) -> None:  # noqa: ANN401
    """Add the runtime bench, whose options choose the case to run."""
    bench = benches.add_parser(
        "runtime",
        help="plans executed on two ranks of one core each, beside their requirements",
        description="Static, EPLB, Equilibra and forced-balanced routing in turn, and a plain layer without a plan. "
        "Routing: --trace, or dsv2-lite-law and gpt-oss-20b in --traces (or $EQUILIBRA_TRACES), or synthetic.",
    )
    bench.add_argument("--trace", metavar="FILE", help="a recording: NAME.npz or NAME.eqtrace")
    bench.add_argument(
        "--select", choices=("even", "skewed"), default="even",
        help="part of --trace: layers and micro-batches evenly spread (even), or the layers and sequences with most "
        "imbalance (skewed)",
    )  # fmt: skip
    bench.add_argument("--traces", metavar="DIR", help="folder with gpt-oss-20b.npz and dsv2-lite-law.npz")
    bench.add_argument("--layers", type=positive, metavar="N", help="MoE layers (2; 1 of skewed routing)")
    bench.add_argument("--micro-batches", type=positive, default=2, metavar="N", help="micro-batches of a step (2)")
    bench.add_argument(
        "--tokens", type=positive, metavar="N", help="tokens of a micro-batch, on both ranks together (4096)"
    )
    bench.add_argument("--hidden", type=positive, metavar="N", help="width of a token (512)")
    bench.add_argument("--ffn", type=positive, metavar="N", help="inner width of an expert (512)")
    bench.add_argument("--repeats", type=positive, metavar="N", help="timed rounds of all contenders (7)")
    bench.add_argument("--spare-slots", type=positive, default=2, metavar="N", help="flash copies a rank can hold (2)")
    bench.add_argument(
        "--path", choices=("collective", "host"), help="how flash copies travel (host, if shared memory allows)"
    )
    bench.add_argument(
        "--patience", type=positive, metavar="S",
        help="seconds per case to wait until other programs are quiet and to run disturbed steps again (60)",
    )  # fmt: skip
    bench.add_argument("--quick", action="store_true", help="a small run, to see that it works; not for reporting")
    bench.add_argument("--output", metavar="DIR", help="write runtime.json and runtime.md there")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=run_runtime)


def _add_train(benches: Any) -> None:  # noqa: ANN401
    """Whole training steps."""
    bench = benches.add_parser(
        "train",
        help="whole RL steps on two ranks of one core each: what balancing gains, and where the time goes",
        description="Static, Equilibra and forced-balanced routing train in turn on the same rollouts of a small "
        "Qwen3-MoE whose routers are skewed.",
    )
    for name, text in TRAIN_NUMBERS.items():
        bench.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=text)
    bench.add_argument(
        "--skew", type=not_negative, metavar="X",
        help="how much routers favour the experts of one rank (0.35: about 1.45 times the mean rank; 0: not at all)",
    )  # fmt: skip
    bench.add_argument("--path", choices=("collective", "host"), help="how flash copies travel (collective)")
    bench.add_argument(
        "--patience", type=positive, metavar="S",
        help="seconds to wait until other programs are quiet and to run disturbed steps again (60)",
    )  # fmt: skip
    bench.add_argument("--quick", action="store_true", help="a small run, to see that it works; not for reporting")
    bench.add_argument("--output", metavar="DIR", help="write train.json and train.md there")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=run_train)


def run(arguments: argparse.Namespace) -> int:
    """Run the sections of a suite."""
    from benchmarks.problems import traces_folder
    from benchmarks.suite import Setting, environment, run_sections
    from equilibra.core.errors import InputError

    suite = _suite(arguments.suite)
    names = arguments.only or list(suite.sections)
    unknown = [name for name in names if name not in suite.sections]
    if unknown:
        raise InputError(f"no section is named {unknown[0]!r}; use some of {', '.join(suite.sections)}")
    traces = traces_folder(arguments.traces)
    left_out = [name for name in names if name in suite.need_traces and traces is None]
    if left_out:
        _tell(f"left out, no --traces: {', '.join(left_out)}")
    for name, module in suite.need_modules.items():
        if name in names and find_spec(module) is None:
            _tell(f"left out, no {module} (pip install 'equilibra[bench]'): {name}")
            left_out.append(name)
    folder = _folder(arguments, suite)
    setting = Setting(traces=traces, quick=arguments.quick)
    result: dict[str, Any] = {"left_out": left_out, "sections": {}}
    about = {"command": f"equilibra bench {suite.name}" + " --quick" * arguments.quick, "measured_on": environment()}
    if traces is not None:
        about["command"] += " --traces DIR"
    chosen = [name for name in names if name not in left_out]
    for name, rows in run_sections(suite, setting, chosen, _tell):
        result["sections"][name] = {**about, "rows": rows}
    return _finish(suite, result, folder, arguments)


def run_runtime(arguments: argparse.Namespace) -> int:
    """Run the cases of the runtime bench."""
    from benchmarks.problems import traces_folder
    from benchmarks.runtime.case import Select
    from benchmarks.runtime.figures import RUNTIME, measured
    from benchmarks.runtime.setting import RuntimeSetting, cases_for
    from equilibra.core.errors import InputError

    asked = {
        name: getattr(arguments, name)
        for name in ("tokens", "micro_batches", "layers", "hidden", "ffn", "repeats", "spare_slots", "path", "patience")
        if getattr(arguments, name) is not None
    }
    setting = RuntimeSetting(quick=arguments.quick, **{"repeats": 2, **asked} if arguments.quick else asked)
    folder = _folder(arguments, RUNTIME)
    if arguments.trace and arguments.traces:
        raise InputError("give either --trace FILE or --traces DIR")
    cases, left_out = cases_for(
        setting,
        trace=Path(arguments.trace) if arguments.trace else None,
        select=Select(arguments.select),
        traces=None if arguments.trace else traces_folder(arguments.traces),
    )
    if left_out and not arguments.trace:
        _tell(f"left out, not in --traces: {', '.join(left_out)}")
    command = _runtime_command(arguments, asked)
    result = measured(setting, cases, command=command, left_out=left_out, tell=_tell)
    return _finish(RUNTIME, result, folder, arguments)


def run_train(arguments: argparse.Namespace) -> int:
    """Run the training bench."""
    from benchmarks.train.figures import measured
    from benchmarks.train.setting import QUICK, TrainSetting
    from benchmarks.train.tables import TRAIN

    names = (*TRAIN_NUMBERS, "skew", "path", "patience")
    asked = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    setting = TrainSetting(**{**QUICK, **asked} if arguments.quick else asked)
    folder = _folder(arguments, TRAIN)
    words = [f"--{name.replace('_', '-')} {value:g}" if name == "skew" else f"--{name.replace('_', '-')} {value}"
             for name, value in asked.items()]  # fmt: skip
    command = " ".join(["equilibra bench train", *words, *["--quick"] * arguments.quick])
    return _finish(TRAIN, measured(setting, command=command, tell=_tell), folder, arguments)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _folder(arguments: argparse.Namespace, suite: Suite) -> Path | None:
    """The output folder; an error before anything is measured if it cannot be written."""
    from benchmarks.suite import earlier_results
    from equilibra.core.errors import InputError

    if not arguments.output:
        return None
    folder = Path(arguments.output)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; create it first")
    earlier_results(suite, folder)
    return folder


def _finish(suite: Suite, result: dict[str, Any], folder: Path | None, arguments: argparse.Namespace) -> int:
    from benchmarks.suite import markdown, plain, write_results

    for section in result["sections"].values():
        section["rows"] = plain(section["rows"])
    if folder is not None:
        write_results(suite, result, folder)
    print(json.dumps(result) if arguments.json else markdown(suite, result))
    return 0


def _runtime_command(arguments: argparse.Namespace, asked: dict[str, Any]) -> str:
    """The command as entered, without names of folders."""
    words = ["equilibra bench runtime"]
    if arguments.trace:
        words.append(f"--trace {Path(arguments.trace).name} --select {arguments.select}")
    elif arguments.traces:
        words.append("--traces DIR")
    defaults = {"micro_batches": 2, "spare_slots": 2}
    words += [f"--{key.replace('_', '-')} {value}" for key, value in asked.items() if defaults.get(key) != value]
    return " ".join(words + ["--quick"] * arguments.quick)


def not_negative(text: str) -> float:
    """A number that is at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return value


def _suite(name: str) -> Suite:
    if name == "planner":
        from benchmarks.planner import PLANNER

        return PLANNER
    from benchmarks.paper import PAPER

    return PAPER
