"""`equilibra simulate`: what would each planner do to my training step? `equilibra report`: show a run as a page."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import Progress, add_cluster, check_target, named_like, number, positive
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.core.load import SequenceLoad
    from equilibra.core.model import MoEModel
    from equilibra.events.run import Run
    from equilibra.simulate.entry import Answer
    from equilibra.trace.routing import Recording

DEFAULT_MODEL, DEFAULT_HARDWARE = "qwen3-30b-a3b", "h200"


def add_simulate(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "simulate",
        help="what would each planner do to my training step? A table and a report",
        description="Replays one RL step (old log-probabilities, then the update) under several planners and a cost "
        "model of the cluster. Token counts are exact, times are modelled. --nodes x --ranks-per-node is one "
        "expert-parallel group.",
    )
    parser.add_argument("--trace", nargs="+", metavar="FILE", help="routing of one step (.npz or .eqtrace; several "
                        "files are joined); default: synthetic routing")  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="preset, .toml or config.json (the preset that fits --trace)")
    parser.add_argument("--hardware", default=DEFAULT_HARDWARE, metavar="NAME", help="preset or .toml (h200)")
    add_cluster(parser, ranks_per_node=None)
    parser.add_argument("--tokens-per-microbatch", type=positive, metavar="T", help="token budget of the whole group "
                        "(4096 per rank)")  # fmt: skip
    parser.add_argument("--planner", nargs="+", metavar="NAME", help="planners to compare with static and balanced")
    copies = parser.add_argument_group("copies")
    number(copies, "--spare-slots", 2, "S", "flash copies a rank can hold", kind=int)
    number(copies, "--standing-slots", 2, "S", "standing copies per node and layer", kind=int)
    number(copies, "--prefetch-depth", 1, "D", "layers by which copies are prefetched", kind=int)
    for stage in ("logprob", "update"):
        copies.add_argument(f"--{stage}-path", choices=("nvlink", "host"), default="nvlink",
                            help=f"where flash copies of the {stage} stage come from (nvlink)")  # fmt: skip
    step = parser.add_argument_group("the step")
    number(step, "--pipeline-stages", 1, "P", "pipeline stages, 1F1B")
    number(step, "--data-parallel", 1, "D", "expert-parallel groups, each with its own sequences")
    number(step, "--optimizer-steps", 1, "O", "mini-batches of the update")
    step.add_argument("--ranks-per-sequence", type=positive, metavar="C", help="ranks that share a sequence (a node)")
    step.add_argument("--no-activation-recompute", dest="activation_recompute", action="store_false",
                      help="keep all activations")  # fmt: skip
    step.add_argument("--no-logprob-stage", dest="logprob_stage", action="store_false",
                      help="update only, no old log-probabilities")  # fmt: skip
    step.add_argument("--history", metavar="FILE", help="the last step's routing, for eplb-history (the first "
                      "half of this step)")  # fmt: skip
    made = parser.add_argument_group("without --trace")
    number(made, "--prompts", 64, "P", "prompts of the step")
    number(made, "--answers", 16, "A", "answers per prompt")
    number(made, "--seed", 0, "N", "random seed of the routing", kind=int)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--output", metavar="RUN", help="keep the run in this folder, for `equilibra report`")
    out.add_argument("--report", nargs="?", const="equilibra-report.html", metavar="FILE.html", help="write the report")
    out.add_argument("--perfetto", metavar="FILE.json", help="write equilibra's timeline for ui.perfetto.dev")
    out.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    from equilibra.core.checks import PlanLimits
    from equilibra.core.placement import Cluster
    from equilibra.cost.presets import load_prices
    from equilibra.events.run import save_run
    from equilibra.simulate import entry
    from equilibra.simulate.times import CopyPath, RunSetting

    targets = [path for path in (arguments.output, arguments.report, arguments.perfetto) if path is not None]
    for path in targets:
        check_target(path, overwrite=arguments.overwrite, folder=path is arguments.output)
    if len({Path(path).absolute() for path in targets}) < len(targets):
        raise InputError(f"--output, --report and --perfetto must be different files, not {', '.join(targets)}")
    progress = Progress()
    hardware = load_prices(arguments.hardware)
    arguments.ranks_per_node = arguments.ranks_per_node or hardware.ranks_per_node
    cluster = Cluster(**named_like(Cluster, arguments))
    model, sequences, inputs, history = _routing(arguments, cluster.num_ranks)
    paths = {name: CopyPath(getattr(arguments, name)) for name in ("logprob_path", "update_path")}
    question = entry.Question(
        sequences=sequences,
        model=model,
        hardware=hardware,
        cluster=cluster,
        tokens_per_microbatch=arguments.tokens_per_microbatch or 4096 * cluster.num_ranks,
        planners=arguments.planner or entry.DEFAULT_PLANNERS,
        limits=PlanLimits(spare_slots=arguments.spare_slots, standing_slots=arguments.standing_slots),
        setting=RunSetting(**named_like(RunSetting, arguments) | paths),
        ranks_per_sequence=arguments.ranks_per_sequence,
        history_LE=history,
    )
    about: dict[str, Any] = {"command": "equilibra " + shlex.join(sys.argv[1:]), "inputs": inputs}
    if not arguments.trace:
        about["warnings"] = ["the routing is synthetic, not recorded: your own may be more or less skewed"]
    try:
        answer = entry.simulate(question, about=about, keep_records=bool(targets), tell=progress.step)
    finally:
        progress.close()
    _print(answer, as_json=arguments.json)
    sys.stdout.flush()
    if arguments.output is not None:  # last: a full disk must not cost the answer
        save_run(answer.run, arguments.output, overwrite=arguments.overwrite)
        print(f"wrote {arguments.output}", file=sys.stderr)
    _write(answer.run, arguments.report, arguments.perfetto, overwrite=arguments.overwrite)
    return 0


def _routing(arguments: argparse.Namespace, num_ranks: int) -> tuple[MoEModel, SequenceLoad, list[dict[str, Any]], Any]:
    """The model, the loads, a description of the inputs, and the last step's loads."""
    import numpy as np

    from equilibra.cost.presets import load_model
    from equilibra.simulate.scenario import check_fits, joined
    from equilibra.trace.open import load_trace
    from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads

    if arguments.trace:
        recordings = [load_trace(path) for path in arguments.trace]
        named = arguments.model
        model = _fitting_model(recordings[0], arguments.trace[0]) if named is None else load_model(named)
        for recording, path in zip(recordings, arguments.trace, strict=True):
            check_fits(recording, model, path)
        inputs = [_input(path, recording) for path, recording in zip(arguments.trace, recordings, strict=True)]
        history = None
        if arguments.history is not None:
            last = load_trace(arguments.history)
            check_fits(last, model, arguments.history)
            history = joined([last]).tokens_SLE.sum(axis=0, dtype=np.int64)
        return model, joined(recordings), inputs, history
    if arguments.history is not None:
        raise InputError("--history goes with --trace")
    model = load_model(DEFAULT_MODEL if arguments.model is None else arguments.model)
    size = SynthShape(
        num_prompts=arguments.prompts, answers_per_prompt=arguments.answers, num_layers=model.num_layers,
        num_experts=model.num_experts, top_k=model.top_k,
    )  # fmt: skip
    budget = arguments.tokens_per_microbatch or 4096 * num_ranks
    knobs = SynthKnobs(max_length=min(SynthKnobs().max_length, budget))
    print("no --trace: simulating synthetic routing, not yours", file=sys.stderr)
    history = synthesize_loads(size, knobs, seed=arguments.seed).tokens_SLE.sum(axis=0, dtype=np.int64)
    made = synthesize_loads(size, knobs, seed=arguments.seed, step=1)
    about = {"name": "synthetic", "synthetic": {**vars(size), **vars(knobs), "seed": arguments.seed}}
    return model, made, [about], history


def _fitting_model(recording: Recording, path: str) -> MoEModel:
    """The only preset with the recording's shape."""
    from equilibra.core.model import MODELS

    shape = (recording.num_layers, recording.num_experts, recording.top_k)
    found = [model for model in MODELS.values() if (model.num_layers, model.num_experts, model.top_k) == shape]
    if len(found) != 1:
        raise InputError(
            f"{path} has {shape[0]} MoE layers, {shape[1]} experts, top-{shape[2]}, the shape of "
            f"{'several presets' if found else 'no preset'}: name the model with --model (a name or a file)"
        )
    print(
        f"no --model: taking {found[0].name}, the preset of {shape[0]} MoE layers, {shape[1]} experts, top-{shape[2]}",
        file=sys.stderr,
    )
    return found[0]


def _input(path: str, recording: Recording) -> dict[str, Any]:
    file = Path(path)
    entry: dict[str, Any] = {
        "name": file.name, "sequences": recording.num_sequences, "tokens": int(recording.offsets[-1]),
    }  # fmt: skip
    if file.is_file():
        entry["sha256"] = sha256(file.read_bytes()).hexdigest()
    return entry


def _print(answer: Answer, *, as_json: bool) -> None:
    about, metrics = answer.run.about, answer.metrics
    if as_json:
        short = {"model": about["model"]["name"], "hardware": about["hardware"]["name"]}
        print(json.dumps({**about, **short, "planners": metrics}))
        return
    cluster, model = about["cluster"], about["model"]
    names = ", ".join(entry["name"] for entry in about["inputs"])
    print(
        f"One step of {model['name']} on {about['ranks']} ranks of {about['hardware']['name']} "
        f"({cluster['num_nodes']} nodes x {cluster['ranks_per_node']} per expert-parallel group), routing: {names}, "
        f"{about['sequences']:,} sequences, {about['tokens']:,} tokens. Simulated: counts are exact, times modelled.\n"
    )
    print(
        f"{'planner':14}{'step':>10}{'speedup':>9}{'of balanced':>13}{'imbalance':>11}{'p99':>7}{'copies':>8}"
        f"{'exposed':>10}{'memory':>10}"
    )
    for name, row in metrics.items():
        print(
            f"{name:14}{row['step_time_s']:>8.3f} s{row['speedup_over_static']:>8.2f}x"
            f"{row['share_of_balanced']:>12.1%} {row['imbalance_mean']:>10.3f}{row['imbalance_p99']:>7.2f}"
            f"{row['copies_per_layer']:>8.1f}{row['exposed_overhead_s']:>8.3f} s"
            f"{row['peak_memory_bytes'] / 1e9:>7.1f} GB"
        )
    print(
        "\nspeedup: over static. of balanced: step time of balanced over that of this planner. imbalance: slowest rank "
        "over mean.\ncopies: flash and standing, per layer and micro-batch. exposed: time the step waits for planning, "
        "copies, moves and\ncounts. memory: peak of the fullest rank. balanced: an ideal, not a plan."
    )
    for line in about["warnings"]:
        print(f"note: {line}", file=sys.stderr)


def _write(
    run: Run, page: str | Path | None, perfetto: str | None, *, planner: str | None = None, overwrite: bool
) -> None:
    from equilibra.report.page import write_report
    from equilibra.report.timeline import write_perfetto

    if perfetto is not None:
        write_perfetto(run, Path(perfetto), planner=planner, overwrite=overwrite)
        print(f"wrote {perfetto}; open it in ui.perfetto.dev", file=sys.stderr)
    if page is not None:
        write_report(run, Path(page), overwrite=overwrite)
        print(f"wrote {page} ({Path(page).stat().st_size / 1e6:.1f} MB); open it in a browser", file=sys.stderr)


def add_report(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "report",
        help="turn a run into one self-contained HTML page",
        description="Reads a run folder (of `equilibra simulate` or `equilibra train`) and writes one self-contained "
        "HTML file: the gain, heat maps, every copy, the timeline, memory. --perfetto writes a trace for "
        "ui.perfetto.dev.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("--output", metavar="FILE.html", help="the page (RUN.html, unless only --perfetto is given)")
    parser.add_argument("--perfetto", metavar="FILE.json", help="write the timeline of one planner as a trace")
    parser.add_argument("--planner", metavar="NAME", help="with --perfetto: whose timeline (equilibra)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> int:
    from equilibra.events.run import load_run

    if arguments.planner is not None and arguments.perfetto is None:
        raise InputError("--planner goes with --perfetto: it says whose timeline to write")
    folder, page = Path(arguments.folder), arguments.output
    if page is None and arguments.perfetto is None:
        page = folder.resolve().parent / f"{folder.resolve().name}.html"
    _write(load_run(folder), page, arguments.perfetto, planner=arguments.planner, overwrite=arguments.overwrite)
    return 0
