"""`equilibra plan`: plan copies for a load matrix, or a whole step for a routing recording."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import add_cluster, named_like, number
from equilibra.core.atomic import DAMAGED
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from equilibra.core.plan import StepPlan
    from equilibra.plan.planner import StepProblem


def add_parser(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "plan",
        help="plan the copies for a load matrix, or a whole step from a routing recording",
        description="With --loads: balance every row of a load matrix on its own (one layer and micro-batch each, "
        "contiguous homes, copies inside nodes). With --trace: plan a whole step, with micro-batches, homes and "
        "standing copies, and write it with --output.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--loads", metavar="FILE.npy", help="integers [problems, experts] or [problems, source ranks, experts]"
    )
    source.add_argument("--trace", metavar="FILE", help="a routing recording (.npz or .eqtrace)")
    add_cluster(parser)
    number(parser, "--spare-slots", 2, "S", "flash copies a rank can hold", kind=int)
    number(parser, "--tolerance", 0.005, "X", "imbalance accepted to save copies", kind=float)
    number(parser, "--standing-slots", 2, "S", "with --trace: standing copies per node and layer", kind=int)
    number(parser, "--tokens-per-rank", 8192, "T", "with --trace: token budget of a rank per micro-batch")
    parser.add_argument("--model", metavar="NAME", help="with --trace: price copies and moves for this model's "
                        "experts (default: they are free)")  # fmt: skip
    parser.add_argument("--hardware", metavar="NAME", help="with --model: preset or .toml with the prices (default: an "
                        "H200 on which a copy costs no more than its rows)")  # fmt: skip
    parser.add_argument("--max-moves", dest="max_moves_per_layer", type=int, default=-1, metavar="N",
                        help="with --trace: homes that may move per layer (default: as many as pay off)")  # fmt: skip
    parser.add_argument("--planner", metavar="NAME", help="with --trace: equilibra (default) or a baseline")
    parser.add_argument("--previous", metavar="PLAN", help="with --trace: start from the homes of this plan file")
    parser.add_argument("--output", metavar="PLAN", help="with --trace: write the plan to this file (.npz)")
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.tolerance < 1000:
        raise InputError(f"--tolerance must be from 0 to below 1000, not {arguments.tolerance}")
    if arguments.hardware is not None and arguments.model is None:
        raise InputError("--hardware goes with --model: without a model copies and moves are free")
    if arguments.loads is None:
        return _plan_trace(arguments)
    for option in ("output", "previous", "model", "hardware", "planner"):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option} goes with --trace, not with --loads")
    return _plan_loads(arguments)


def _plan_loads(arguments: argparse.Namespace) -> int:
    import numpy as np

    from equilibra.core.placement import Cluster
    from equilibra.plan.entry import over_sources, solve_problems

    cluster = Cluster(**named_like(Cluster, arguments))
    loads = _read_loads(arguments.loads, cluster.num_ranks)
    cluster.experts_per_rank(loads.shape[-1])
    tokens = (
        over_sources(loads, cluster.num_ranks)
        if loads.ndim == 2
        else np.ascontiguousarray(loads.transpose(0, 2, 1), dtype=np.int32)
    )
    solved = solve_problems(tokens, cluster=cluster, spare_slots=arguments.spare_slots, tolerance=arguments.tolerance)
    result = {
        "imbalance_before": solved.imbalance_before.tolist(),
        "imbalance_after": solved.imbalance_after.tolist(),
        "lower_bound": solved.lower_bound.tolist(),
        "copies": solved.copies.tolist(),
        "solve_us_median": float(np.median(solved.solve_us)),
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'problem':>8} {'before':>8} {'after':>8} {'bound':>8} {'copies':>7}")
    rows = zip(
        result["imbalance_before"], result["imbalance_after"], result["lower_bound"], result["copies"], strict=True
    )
    for p, (before, after, bound, copies) in enumerate(rows):
        print(f"{p:>8} {before:>8.4f} {after:>8.4f} {bound:>8.4f} {copies:>7}")
    print(f"median solve {result['solve_us_median']:.1f} us", file=sys.stderr)
    return 0


def _read_loads(path: str, num_ranks: int) -> NDArray[np.int64]:
    import numpy as np

    try:
        with open(path, "rb") as file:  # noqa: PTH123 - np.load takes the open file, so a folder fails clearly here
            loads = np.load(file, allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except DAMAGED as error:
        raise InputError(f"cannot read {path}: not a .npy array of numbers, or damaged ({error})") from error
    if not isinstance(loads, np.ndarray):
        raise InputError(f"{path} has several arrays, but --loads takes one array in a .npy file")
    if not np.issubdtype(loads.dtype, np.integer):
        raise InputError(f"loads must be integers, {path} has {loads.dtype}; convert with loads.astype('int64')")
    if loads.ndim not in (2, 3) or 0 in loads.shape:
        raise InputError(
            f"loads must be [problems, experts] or [problems, source ranks, experts], all above 0, not {loads.shape}"
        )
    if loads.ndim == 3 and loads.shape[1] != num_ranks:
        raise InputError(f"{path} has {loads.shape[1]} source ranks, the cluster has {num_ranks}: they must be equal")
    if loads.min() < 0 or loads.max() >= 2**31:
        raise InputError(f"loads must be from 0 to {2**31 - 1}, {path} has {loads.min()} to {loads.max()}")
    return loads.astype(np.int64)


def _plan_trace(arguments: argparse.Namespace) -> int:
    from equilibra.core.checks import PlanLimits
    from equilibra.core.placement import Cluster
    from equilibra.cost.presets import AUTO
    from equilibra.plan.entry import step_problem
    from equilibra.plan.planner import planner_named, respects_slots
    from equilibra.plan.step import Equilibra
    from equilibra.plan.store import load_plan, save_plan
    from equilibra.trace.open import load_trace

    cluster = Cluster(**named_like(Cluster, arguments))
    ours = Equilibra(tolerance=arguments.tolerance)
    planner = ours if arguments.planner in (None, ours.name) else planner_named(arguments.planner)
    problem = step_problem(
        load_trace(arguments.trace),
        cluster=cluster,
        model=arguments.model,
        tokens_per_rank=arguments.tokens_per_rank,
        previous=None if arguments.previous is None else load_plan(arguments.previous).placement,
        limits=PlanLimits(**named_like(PlanLimits, arguments)),
        hardware=AUTO if arguments.hardware is None else arguments.hardware,
    )
    plan = planner.plan(problem)
    plan.check(
        problem.load_under(plan.schedule), spare_slots=arguments.spare_slots if respects_slots(planner) else None
    )
    result = _figures(plan, problem)
    if arguments.output is not None:
        save_plan(plan, arguments.output, overwrite=arguments.overwrite)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        shown = ", ".join(f"{k} {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key:26} {shown:.5g}" if isinstance(shown, float) else f"{key:26} {shown}")
    if arguments.output is not None:
        print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def _figures(plan: StepPlan, problem: StepProblem) -> dict[str, Any]:
    from equilibra.core.load import imbalance, spread
    from equilibra.core.plan import Stage
    from equilibra.plan.planner import planner_named

    load, static = problem.load_under(plan.schedule), planner_named("static").plan(problem)
    before, after = spread(imbalance(static.rank_load(problem.load))), spread(imbalance(plan.rank_load(load)))
    num_problems = plan.num_layers * plan.num_micro_batches
    return {
        "planner": plan.planner,
        "micro_batches": plan.num_micro_batches,
        "imbalance_before": before.mean,
        "imbalance_after": after.mean,
        "imbalance_after_p99": after.p99,
        "gap_to_bound": plan.gap(load),
        "flash_copies_per_layer": {stage.value: plan.stages[stage].num_copies / num_problems for stage in Stage},
        "standing_copies_per_layer": plan.standing.num_copies / plan.num_layers,
        "moves": plan.migration.num_moves,
        "digest": plan.digest,
    }
