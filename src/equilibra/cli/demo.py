"""`equilibra demo`: plan one synthetic RL step and show it before and after. What `make run` runs."""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import add_cluster, positive

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["add_parser"]

SHADES = " .:-=+*#%@"


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
    parser = commands.add_parser("demo", help="plan a synthetic RL step and show it before and after")
    add_cluster(parser, nodes=4)
    parser.add_argument("--model", default="qwen3-30b-a3b", metavar="NAME", help="shapes (qwen3-30b-a3b)")
    parser.add_argument("--prompts", type=positive, default=64, metavar="P", help="prompts of the step (64)")
    parser.add_argument("--answers", type=positive, default=16, metavar="A", help="answers to each prompt (16)")
    parser.add_argument("--tokens-per-rank", type=positive, default=8192, metavar="T", help="per micro-batch (8192)")
    parser.add_argument("--seed", type=int, default=0, help="of the routing (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan with every planner and show."""
    _tell("making the routing of one RL step (the first run also compiles the planner, about a minute)")
    from equilibra.core.cluster import Cluster
    from equilibra.core.model import model_named
    from equilibra.core.plan import Stage
    from equilibra.measure.imbalance import imbalance
    from equilibra.plan.entry import step_problem
    from equilibra.plan.planner import planner_named
    from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads

    model = model_named(arguments.model)
    cluster = Cluster(num_nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node)
    cluster.experts_per_rank(model.num_experts)
    size = SynthShape(
        num_prompts=arguments.prompts, answers_per_prompt=arguments.answers, num_layers=model.num_layers,
        num_experts=model.num_experts, top_k=model.top_k,
    )  # fmt: skip
    knobs = SynthKnobs(max_length=min(arguments.tokens_per_rank, SynthKnobs().max_length))
    last = synthesize_loads(size, knobs, seed=arguments.seed).tokens_SLE.sum(axis=0, dtype="int64")
    sequences = synthesize_loads(size, knobs, seed=arguments.seed, step=1)
    problem = step_problem(
        sequences, cluster=cluster, model=model, tokens_per_rank=arguments.tokens_per_rank, history_LE=last
    )
    rows: list[dict[str, Any]] = []
    pictures: dict[str, NDArray[np.int64]] = {}
    for name in ("static", "lpt", "eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra", "balanced"):
        planner = planner_named(name)
        planner.plan(problem)
        start = perf_counter()
        plan = planner.plan(problem)
        seconds = perf_counter() - start
        load = problem.load_under(plan.schedule)
        rank_load = plan.rank_load(load)
        ratio = imbalance(rank_load)
        rows.append({
            "planner": name,
            "imbalance_mean": float(ratio.mean()),
            "imbalance_worst": float(ratio.max()),
            "slowest_ranks": int(rank_load.max(axis=2).sum()),
            "over_bound": plan.gap(load),
            "flash_copies_per_layer": plan.stages[Stage.UPDATE].num_copies / plan.num_layers / plan.num_micro_batches,
            "standing_copies_per_layer": plan.standing.num_copies / plan.num_layers,
            "moves": plan.migration.num_moves,
            "plan_s": seconds,
        })  # fmt: skip
        pictures[name] = rank_load
        _tell(f"planned with {name} in {seconds:.2f} s")
    if arguments.json:
        print(json.dumps({"model": model.name, "ranks": cluster.num_ranks, "planners": rows}))
        return 0
    layer = int(imbalance(pictures["static"]).mean(axis=1).argmax())
    tokens = int(sequences.length_of_sequence.sum())
    print(
        f"\nOne synthetic RL step: {sequences.num_sequences} answers, {tokens:,} tokens, {model.name} shapes "
        f"({model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}), "
        f"{cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks.\n"
    )
    for name, title in (("static", "before: static placement"), ("equilibra", "after: equilibra")):
        print(f"Load of every rank (down) in every micro-batch (across), layer {layer}, {title}")
        print(_picture(pictures[name][layer]) + "\n")
    print(_table(rows))
    print(
        "\nimbalance: slowest rank over mean rank, 1.000 is perfect. step: time of the expert layers as the slowest\n"
        "ranks set it, against static. flash, standing: copies per layer (flash: and micro-batch). moves: homes that\n"
        "move before the step. equilibra weighs copies and moves by what the model's experts cost, so with few tokens\n"
        "it makes few; packing may need fewer micro-batches (columns). Counts of tokens are exact, planning time is\n"
        "measured."
    )
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _picture(load_MR: NDArray[np.int64]) -> str:
    """Two characters per rank and micro-batch; + is the mean, @ far above it, where others wait."""
    relative = load_MR / load_MR.mean(axis=1, keepdims=True)
    colour = sys.stdout.isatty()
    lines = []
    for rank, row in enumerate(relative.T):
        line = ""
        for value in row:
            shade = min(round(value * 5), len(SHADES) - 1)
            if colour:
                code = 16 + 36 * min(int(max(value - 1, 0) * 5), 5) + 6 * min(int(min(value, 1) * 3), 3)
                line += f"\033[48;5;{code}m  \033[0m"
            else:
                line += SHADES[shade] * 2
        lines.append(f"{rank:>4} {line} {row.max():.2f}")
    return "\n".join([*lines, "     shade: load over mean, blank 0, + 1, @ 1.8 and more; right: the rank's worst"])


def _table(rows: list[dict[str, Any]]) -> str:
    static = rows[0]["slowest_ranks"]
    lines = [
        f"{'planner':13}{'imbalance':>10}{'worst':>8}{'step':>8}{'flash':>8}{'standing':>9}{'moves':>7}{'plan':>9}"
    ]
    lines += [
        f"{row['planner']:13}{row['imbalance_mean']:>10.3f}{row['imbalance_worst']:>8.2f}"
        f"{static / max(row['slowest_ranks'], 1):>7.2f}x{row['flash_copies_per_layer']:>8.1f}"
        f"{row['standing_copies_per_layer']:>9.1f}{row['moves']:>7}{row['plan_s']:>7.2f} s"
        for row in rows
    ]
    return "\n".join(lines)
