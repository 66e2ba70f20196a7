"""`equilibra trace info | convert | synth`: inspect a routing recording, convert it, or make a synthetic one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from equilibra.cli.arguments import announced, number
from equilibra.core.errors import InputError, TraceFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equilibra.integrations.routing_formats import RoutedModel
    from equilibra.trace.count import TraceSummary
    from equilibra.trace.synth import SynthKnobs, SynthShape

BLOCKS = "▁▂▃▄▅▆▇█"
KNOBS = {
    "popularity_skew": (float, "spread of log-popularity over experts; 0: uniform"),
    "sequence_noise": (float, "spread of a sequence's own preferences; 0: none"),
    "group_correlation": (float, "correlation between answers to one prompt, 0 to 1"),
    "drift": (float, "share of popularity that changes per step, 0 to 1"),
    "median_length": (float, "median tokens per sequence"),
    "length_tail": (float, "spread of log-length; 0: equal lengths"),
    "max_length": (int, "tokens at which sequences are cut off"),
}
RESPONSES = ("vllm", "sglang")
LINES = (".jsonl", ".ndjson")
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")
MODEL = "give --model FOLDER (with its config.json), or --layers, --top-k and --experts"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = subparsers.add_parser("trace", help="inspect a routing recording, convert it, or make a synthetic one")
    commands = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    _add_info(commands)
    _add_convert(commands)
    _add_synth(commands)


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    info = commands.add_parser("info", help="what a recording contains, and its imbalance on a cluster")
    info.add_argument("file", metavar="FILE", help="NAME.npz or NAME.eqtrace")
    number(info, "--nodes", 1, "N", "nodes", kind=int)
    number(info, "--ranks-per-node", 8, "G", "ranks per node", kind=int)
    number(info, "--tokens-per-microbatch", 8192, "T", "token budget of the whole group", kind=int)
    info.add_argument("--experts", type=int, metavar="E", help="experts per layer, if an .npz does not say")
    info.add_argument("--distinct", action="store_true", help="refuse tokens routed twice to one expert of a layer")
    info.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)


def _add_synth(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    synth = commands.add_parser("synth", help="make the routing of a synthetic RL step")
    synth.add_argument("target", metavar="OUT", help="NAME.npz or NAME.eqtrace")
    synth.add_argument("--like", metavar="TRACE", help="take knobs, layers, experts and top-k from this recording")
    synth.add_argument("--experts", type=int, metavar="E", help="experts per layer (128)")
    synth.add_argument("--layers", type=int, metavar="L", help="MoE layers (48)")
    synth.add_argument("--top-k", type=int, metavar="K", help="experts per token (8)")
    number(synth, "--prompts", 32, "P", "prompts of the step", kind=int)
    number(synth, "--answers", 8, "A", "answers per prompt", kind=int)
    number(synth, "--seed", 0, "N", "random seed", kind=int)
    number(synth, "--step", 0, "N", "steps of drift before this one", kind=int)
    synth.add_argument("--no-last-token", action="store_true", help="do not record the last token of each answer")
    for name, (kind, text) in KNOBS.items():
        synth.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    synth.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    synth.add_argument("--json", action="store_true", help="print one JSON object")
    synth.set_defaults(run=_synth)


def _info(arguments: argparse.Namespace) -> int:
    from equilibra.core.placement import Cluster
    from equilibra.trace.count import require_distinct_experts, summarize
    from equilibra.trace.open import load_trace

    cluster = Cluster(num_nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node)
    with announced(f"reading {arguments.file}"):
        recording = load_trace(arguments.file, num_experts=arguments.experts, verify=not arguments.no_verify)
        if arguments.distinct:
            require_distinct_experts(recording)
        summary = summarize(recording, cluster, arguments.tokens_per_microbatch)
    print(json.dumps(asdict(summary)) if arguments.json else _table(arguments.file, summary))
    return 0


def _synth(arguments: argparse.Namespace) -> int:
    from equilibra.trace.open import save_trace
    from equilibra.trace.synth import synthetic_recording

    with announced(f"making {arguments.target}"):
        size, knobs = _wanted(arguments)
        recording = synthetic_recording(
            size, knobs, seed=arguments.seed, step=arguments.step, record_last_token=not arguments.no_last_token
        )
        save_trace(recording, arguments.target, overwrite=arguments.overwrite)
    made = {
        "target": arguments.target,
        "tokens": recording.num_tokens,
        "sequences": recording.num_sequences,
        "layers": size.num_layers,
        "experts": size.num_experts,
        "top_k": size.top_k,
        "knobs": asdict(knobs),
    }
    text = "wrote {target}: {tokens} tokens, {sequences} sequences, {layers} layers, {top_k} of {experts} experts"
    lines = [text.format(**made), *(f"  {name:18} {value:g}" for name, value in asdict(knobs).items())]
    print(json.dumps(made) if arguments.json else "\n".join(lines))
    return 0


def _wanted(arguments: argparse.Namespace) -> tuple[SynthShape, SynthKnobs]:
    """Shape and knobs: options first, then those of --like, then the defaults."""
    from equilibra.trace.synth import SynthKnobs, SynthShape

    knobs = SynthKnobs()
    model = {"num_layers": 48, "num_experts": 128, "top_k": 8}
    if arguments.like is not None:
        from equilibra.trace.open import load_trace
        from equilibra.trace.synth import fit_knobs

        real = load_trace(arguments.like)
        knobs = fit_knobs(real, answers_per_prompt=arguments.answers)
        model = {"num_layers": real.num_layers, "num_experts": real.num_experts, "top_k": real.top_k}
    asked = {"num_layers": arguments.layers, "num_experts": arguments.experts, "top_k": arguments.top_k}
    model.update({name: value for name, value in asked.items() if value is not None})
    asked_knobs = {name: getattr(arguments, name) for name in KNOBS if getattr(arguments, name) is not None}
    size = SynthShape(num_prompts=arguments.prompts, answers_per_prompt=arguments.answers, **model)
    return size, replace(knobs, **asked_knobs)


def _table(file: str, summary: TraceSummary) -> str:
    rows = {
        "tokens": f"{summary.tokens:,} ({summary.tokens_without_routing:,} without routing)",
        "sequences": f"{summary.sequences:,} of {summary.length_median:g} tokens (median) to {summary.length_max:,}",
        "model": f"{summary.layers} MoE layers, {summary.top_k} of {summary.experts} experts",
        "cluster": f"{summary.nodes} nodes, {summary.ranks} ranks, contiguous homes",
        "micro-batches": f"{summary.microbatches:,} of {summary.tokens_per_microbatch:,} tokens (budget), file order",
    }
    imbalances = [
        ("batch", summary.imbalance_batch, "totals, mean over layers"),
        ("micro-batch mean", summary.imbalance_microbatch_mean, "mean over micro-batches and layers"),
        ("micro-batch p99", summary.imbalance_microbatch_p99, "99th percentile"),
        ("nodes, mean", summary.node_imbalance_microbatch_mean, "slowest node over mean node, per micro-batch"),
    ]
    lines = [file, *(f"  {name:18} {value}" for name, value in rows.items())]
    lines += ["", "  imbalance (slowest rank over mean rank)"]
    lines += [f"  {name:18} {value:6.3f}  {_bar(value)}  {text}" for name, value, text in imbalances]
    lines += ["", f"  layers 0 to {summary.layers - 1:<7} {_sparkline(summary.imbalance_of_layer)}"]
    lines += [f"  ranks of layer {summary.worst_layer:<3} {_sparkline(summary.load_share_of_rank)}  the worst layer"]
    return "\n".join(lines)


def _bar(value: float) -> str:
    """One mark per 0.1 above 1.0, at most 20."""
    return ("#" * min(20, round((value - 1.0) * 10))).ljust(20, ".")


def _sparkline(values: Sequence[float]) -> str:
    """One block per value, from zero to the largest."""
    top = max(values) or 1.0
    return "".join(BLOCKS[min(7, int(8 * value / top))] for value in values)


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert between .npz and .eqtrace, or from responses of vLLM or SGLang",
        description="SRC is a recording (NAME.npz, NAME.eqtrace), or a file with one response of vLLM's or SGLang's "
        'HTTP server per line (NAME.jsonl), as received or as {"request": ..., "response": ...}. The suffix of DST '
        "decides the format.",
    )
    convert.add_argument("source", metavar="SRC", help="NAME.npz, NAME.eqtrace or NAME.jsonl")
    convert.add_argument("target", metavar="DST", help="NAME.npz or NAME.eqtrace")
    convert.add_argument("--format", choices=("auto", *RESPONSES), default="auto",
                         help="engine that wrote the responses; auto (default): by their contents")  # fmt: skip
    convert.add_argument("--experts", type=int, metavar="E", help="experts per layer, if SRC does not say")
    convert.add_argument("--model", metavar="FOLDER", help="for responses: folder with the model's config.json")
    convert.add_argument("--layers", type=int, metavar="L", help="for responses: decoder layers, dense ones too")
    convert.add_argument("--top-k", type=int, metavar="K", help="for responses: experts per token")
    convert.add_argument("--dense", type=_numbers, metavar="0,1,...", help="for responses: layers without experts")
    convert.add_argument("--start-len", type=int, metavar="N", help="for responses: leading tokens without routing, "
                         "routed_experts_start_len (0)")  # fmt: skip
    convert.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    convert.add_argument("--json", action="store_true", help="print one JSON object")
    convert.set_defaults(run=_convert)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be layer numbers separated by commas, such as 0,1,2, not {text!r}"
        ) from None


def _convert(arguments: argparse.Namespace) -> int:
    suffix = Path(arguments.source).suffix
    if suffix in PICKLES:
        raise TraceFormatError(
            f"cannot open {arguments.source}: {suffix} files are pickles, which can run code when opened; convert the "
            "objects where they were made, with the functions of equilibra.integrations"
        )
    with announced(f"converting {arguments.source}"):
        responses = arguments.format in RESPONSES or suffix in LINES
        tokens, sequences = _convert_responses(arguments) if responses else _convert_recording(arguments)
    made = {"target": arguments.target, "tokens": tokens, "sequences": sequences}
    print(json.dumps(made) if arguments.json else f"wrote {arguments.target}: {tokens} tokens, {sequences} sequences")
    return 0


def _convert_recording(arguments: argparse.Namespace) -> tuple[int, int]:
    from equilibra.trace.open import load_trace, save_trace

    options = ("model", "layers", "top_k", "dense", "start_len")
    if given := [f"--{name.replace('_', '-')}" for name in options if getattr(arguments, name) is not None]:
        raise InputError(
            f"{', '.join(given)} are for responses, but {arguments.source} is a recording: files of responses end in "
            ".jsonl"
        )
    recording = load_trace(arguments.source, num_experts=arguments.experts)
    save_trace(recording, arguments.target, overwrite=arguments.overwrite)
    return recording.num_tokens, recording.num_sequences


def _convert_responses(arguments: argparse.Namespace) -> tuple[int, int]:
    from equilibra.integrations.responses import sequences_of_file
    from equilibra.integrations.routing_formats import save_sequences

    model = _model(arguments)
    engine = None if arguments.format == "auto" else arguments.format
    sequences = sequences_of_file(arguments.source, model, engine=engine, first=arguments.start_len or 0)
    return save_sequences(sequences, arguments.target, model, overwrite=arguments.overwrite)


def _model(arguments: argparse.Namespace) -> RoutedModel:
    """The model of the responses: from config.json, overridden by options."""
    from equilibra.integrations.routing_formats import RoutedModel, model_from_folder

    said = {
        "num_layers": arguments.layers, "top_k": arguments.top_k, "num_experts": arguments.experts,
        "dense_layers": arguments.dense,
    }  # fmt: skip
    given = {name: value for name, value in said.items() if value is not None}
    if arguments.model is not None:
        return replace(model_from_folder(arguments.model), **given)
    if missing := [name for name in ("num_layers", "top_k", "num_experts") if name not in given]:
        raise InputError(f"responses do not say the model's {', '.join(missing)}: {MODEL}")
    return RoutedModel(**given)
