"""`equilibra trace info | convert | synth`: look at a routing recording, convert it, make one.

stdout carries the answer (a table, or one JSON object with --json), stderr a line for work that takes longer
than a second. numpy and numba are imported by the handlers, so that `equilibra --help` does not wait for
them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from equilibra.cli.progress import announced
from equilibra.cli.trace_convert import add_convert

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from equilibra.trace.count import TraceSummary
    from equilibra.trace.synth import SynthKnobs, SynthShape

__all__ = ["add_parser"]

BLOCKS = "▁▂▃▄▅▆▇█"
KNOBS = {
    "popularity_skew": (float, "spread of log-popularity over experts; 0: all alike"),
    "sequence_noise": (float, "how much sequences differ from it; 0: all alike"),
    "group_correlation": (float, "how alike answers to one prompt are, 0 to 1"),
    "drift": (float, "how much of popularity is new after one step, 0 to 1"),
    "median_length": (float, "tokens of a sequence, median"),
    "length_tail": (float, "spread of log-length; 0: all of one length"),
    "max_length": (int, "tokens at which a sequence is cut"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` and its three commands."""
    trace = subparsers.add_parser("trace", help="look at a routing recording, convert it, make a synthetic one")
    commands = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    _add_info(commands)
    add_convert(commands)
    _add_synth(commands)


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    info = commands.add_parser("info", help="what a recording holds, and its imbalance on a cluster")
    info.add_argument("file", metavar="FILE", help="NAME.npz or NAME.eqtrace")
    info.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the cluster (default 1)")
    info.add_argument("--ranks-per-node", type=int, default=8, metavar="G", help="ranks of a node (default 8)")
    info.add_argument(
        "--tokens-per-microbatch", type=int, default=8192, metavar="T", help="token budget (default 8192)"
    )
    info.add_argument("--experts", type=int, metavar="E", help="experts of a layer, where an .npz does not say")
    info.add_argument("--distinct", action="store_true", help="refuse tokens that go to one expert twice in a layer")
    info.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)


def _add_synth(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    synth = commands.add_parser("synth", help="make the routing of a synthetic RL step")
    synth.add_argument("target", metavar="OUT", help="NAME.npz or NAME.eqtrace")
    synth.add_argument("--like", metavar="TRACE", help="take knobs, layers, experts and top-k from this recording")
    synth.add_argument("--experts", type=int, metavar="E", help="experts of a layer (default 128)")
    synth.add_argument("--layers", type=int, metavar="L", help="MoE layers (default 48)")
    synth.add_argument("--top-k", type=int, metavar="K", help="experts per token (default 8)")
    synth.add_argument("--prompts", type=int, default=32, metavar="P", help="prompts of the step (default 32)")
    synth.add_argument("--answers", type=int, default=8, metavar="A", help="answers to each prompt (default 8)")
    synth.add_argument("--seed", type=int, default=0, help="of all random numbers (default 0)")
    synth.add_argument("--step", type=int, default=0, help="steps of drift behind it (default 0)")
    synth.add_argument("--no-last-token", action="store_true", help="leave the last token of each answer unrecorded")
    for name, (kind, text) in KNOBS.items():
        synth.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    synth.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    synth.add_argument("--json", action="store_true", help="print one JSON object")
    synth.set_defaults(run=_synth)


def _info(arguments: argparse.Namespace) -> int:
    from equilibra.core.cluster import Cluster
    from equilibra.trace.count import require_distinct_experts, summarize
    from equilibra.trace.open import load_trace

    cluster = Cluster(num_nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node)
    with announced(f"reading {arguments.file}"):
        recording = load_trace(arguments.file, num_experts=arguments.experts, verify=not arguments.no_verify)
        if arguments.distinct:
            require_distinct_experts(recording)
        summary = summarize(recording, cluster, arguments.tokens_per_microbatch)
    _print(json.dumps(asdict(summary)) if arguments.json else _table(arguments.file, summary))
    return 0


def _synth(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

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
    _print(json.dumps(made) if arguments.json else "\n".join(lines))
    return 0


def _wanted(arguments: argparse.Namespace) -> tuple[SynthShape, SynthKnobs]:
    """What was asked for, else what --like has, else the defaults."""
    from dataclasses import replace

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
    lines = [file, *(f"  {name:18} {value}" for name, value in rows.items()), ""]
    lines += ["  imbalance (slowest rank over mean rank)"]
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


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
