"""`equilibra bench gpu`: plans replayed rank after rank on one device."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import positive

if TYPE_CHECKING:
    from benchmarks.gpu.case import Routing
    from benchmarks.gpu.records import Records
    from equilibra.core.model import MoEModel

NUMBERS = {
    "tokens_per_rank": "tokens of a micro-batch, per rank (4096)",
    "layers": "MoE layers, evenly spread over the model (2)",
    "micro_batches": "micro-batches of the planned step, evenly spread over the recording (2)",
    "repeats": "timed rounds of all contenders (5)",
    "ranks_per_node": "ranks that share fast links (8)",
    "seconds": "time for all cases together; each stops early when its share is used up",
}
"""options that are whole numbers above 0"""


def add_gpu(benches: Any) -> None:  # noqa: ANN401
    """Add the bench."""
    bench = benches.add_parser(
        "gpu",
        help="real routing under every plan, as kernels on one GPU, rank by rank, while copies move",
        description="Static, EPLB, online exact balancing, Equilibra and balanced rows in turn; a layer takes as long "
        "as its slowest rank. Routing: --trace, or gpt-oss-20b and dsv2-lite in --traces (or $EQUILIBRA_TRACES), or "
        "synthetic.",
    )
    bench.add_argument("--trace", metavar="FILE", action="append", help="a recording (may be repeated: each by itself)")
    bench.add_argument("--traces", metavar="DIR", help="folder with gpt-oss-20b.npz and the dsv2-lite recordings")
    bench.add_argument(
        "--model", metavar="NAME", action="append",
        help="preset, .toml or config.json whose hidden and FFN width are taken (may be repeated; gpt-oss-20b, "
        "qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3)",
    )  # fmt: skip
    bench.add_argument("--hidden", type=positive, metavar="N", help="with --ffn: these widths instead of a model's")
    bench.add_argument("--ffn", type=positive, metavar="N", help="inner width of an expert")
    bench.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        action="append",
        help="expert-parallel ranks (may be repeated; 8, 16, 32)",
    )
    for name, text in NUMBERS.items():
        bench.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=text)
    bench.add_argument("--spare-slots", type=int, metavar="S", help="flash copies a rank can hold (2)")
    bench.add_argument("--standing-slots", type=int, metavar="S", help="standing copies per node and layer (2)")
    bench.add_argument(
        "--network",
        action="store_true",
        help="plans count traffic across nodes, as on a cluster; the bench does not run it",
    )
    bench.add_argument(
        "--path", choices=("device", "host"),
        help="where copies come from: another place of the device's memory, or pinned memory of the host (both)",
    )  # fmt: skip
    bench.add_argument("--device", choices=("cuda", "cpu"), help="what computes (cuda)")
    bench.add_argument("--keep", action="store_true", help="add to the cases already in --output")
    bench.add_argument(
        "--redraw", action="store_true", help="measure nothing: write tables and picture of --output anew"
    )
    bench.add_argument("--output", metavar="DIR", help="write gpu.json, gpu.md, gpu.png and raw records there")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the cases."""
    from benchmarks.gpu.case import RANKS, GpuSetting, cases_for
    from benchmarks.gpu.figures import device_named, earlier_outcome, fresh, run_cases
    from benchmarks.gpu.tables import page, result_of, write_gpu
    from equilibra.core.errors import InputError

    folder = Path(arguments.output) if arguments.output else None
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}; create it first")
    if folder is None and (arguments.keep or arguments.redraw):
        raise InputError("--keep and --redraw are about earlier results: name their folder with --output")
    earlier = fresh()
    if folder is not None:  # refuses files of other programs
        earlier = earlier_outcome(folder, records=arguments.keep or arguments.redraw)
    if folder is not None and arguments.redraw:
        return _redraw(*earlier, folder)
    device = device_named(arguments.device)
    asked: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (*NUMBERS, "spare_slots", "standing_slots")
        if getattr(arguments, name) is not None
    }
    paths: dict[str, Any] = {"paths": (arguments.path,)} if arguments.path else {}
    setting = GpuSetting(**asked, **paths, network=arguments.network)
    routings, missing = routings_asked(arguments)
    if missing:
        print(f"left out, not in --traces: {', '.join(missing)}", file=sys.stderr)
    cases, left_out = cases_for(routings, models_asked(arguments), arguments.ranks or list(RANKS), setting)
    for one in left_out:
        print(f"left out: {one['case']}: {one['reason']}", file=sys.stderr)
    earlier[0]["left_out"] = left_out

    def keep(outcome: dict[str, Any], records: Records) -> None:
        if folder is not None:
            write_gpu(result_of(outcome, records), records, folder, picture=False)

    outcome, records = run_cases(
        cases, setting, device=device, command=_command(arguments, asked), earlier=earlier, keep=keep,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    result = result_of(outcome, records)
    if folder is not None:
        write_gpu(result, records, folder)
    print(json.dumps(result) if arguments.json else page(result))
    return 0


def _redraw(outcome: dict[str, Any], records: Records, folder: Path) -> int:
    """Write tables and pictures from existing records."""
    from benchmarks.gpu.tables import result_of, write_gpu
    from equilibra.core.errors import InputError

    if not outcome["cases"]:
        raise InputError(f"{folder} has no gpu.json: there is nothing to draw")
    write_gpu(result_of(outcome, records), records, folder)
    return 0


def models_asked(arguments: argparse.Namespace) -> list[MoEModel]:
    """The models that the options name, or the default ones."""
    from benchmarks.gpu.case import MODELS
    from equilibra.core.errors import InputError
    from equilibra.core.model import MoEModel
    from equilibra.cost.presets import load_model

    if (arguments.hidden is None) != (arguments.ffn is None):
        raise InputError("--hidden and --ffn go together")
    if arguments.hidden is None:
        return [load_model(name) for name in arguments.model or MODELS]
    if arguments.model:
        raise InputError("give either --model or --hidden with --ffn")
    name = f"{arguments.hidden}x{arguments.ffn}"
    return [
        MoEModel(name=name, num_layers=1, hidden=arguments.hidden, expert_ffn=arguments.ffn, num_experts=1, top_k=1)
    ]


def routings_asked(arguments: argparse.Namespace) -> tuple[list[Routing], list[str]]:
    """Recordings from --trace, from a folder, or a synthetic one; also the names of missing files."""
    from benchmarks.gpu.case import RECORDINGS, routing_of
    from benchmarks.problems import traces_folder
    from equilibra.core.errors import InputError
    from equilibra.trace.open import load_trace
    from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

    if arguments.trace and arguments.traces:
        raise InputError("give either --trace FILE or --traces DIR")
    if arguments.trace:
        return [routing_of(Path(file).stem, [load_trace(file)]) for file in arguments.trace], []
    folder = traces_folder(arguments.traces)
    if folder is None:
        print("no --trace and no --traces: synthetic routing, not yours", file=sys.stderr)
        size = SynthShape(num_prompts=24, answers_per_prompt=8, num_layers=8, num_experts=64, top_k=6)
        return [
            routing_of("synthetic", [synthesize(size, SynthKnobs(median_length=200.0, max_length=500), seed=1)])
        ], []
    found, missing = [], []
    for name, parts in RECORDINGS.items():
        files = [folder / f"{part}.npz" for part in parts]
        missing += [file.name for file in files if not file.is_file()]
        there = [load_trace(file) for file in files if file.is_file()]
        found += [routing_of(name, there)] if there else []
    if not found:
        raise InputError(f"{folder} has none of {', '.join(missing)}; name a file with --trace")
    return found, missing


def _command(arguments: argparse.Namespace, asked: dict[str, Any]) -> str:
    """The command as entered, without names of folders."""
    words = ["equilibra bench gpu"]
    words += [f"--trace {Path(file).name}" for file in arguments.trace or ()]
    words += ["--traces DIR"] if arguments.traces else []
    words += [f"--model {Path(name).name}" for name in arguments.model or ()]
    words += [f"--hidden {arguments.hidden} --ffn {arguments.ffn}"] if arguments.hidden else []
    words += [f"--ranks {number}" for number in arguments.ranks or ()]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in asked.items()]
    for name in ("path", "device"):
        words += [f"--{name} {getattr(arguments, name)}"] if getattr(arguments, name) else []
    return " ".join(words + ["--network"] * arguments.network + ["--keep"] * arguments.keep)
