"""Whole steps, timed: loads of sequences in, a complete StepPlan out, each in a fresh process for its peak memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from equilibra.core.atomic import atomic_file
from equilibra.core.cluster import Cluster
from equilibra.core.model import MODELS
from equilibra.core.plan import Stage
from equilibra.cost.rates import rates_for
from equilibra.events.imbalance import imbalance
from equilibra.plan.pack import in_order
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.plan.step import Equilibra
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads

__all__ = ["growth", "plot_growth", "whole_step"]

Row = dict[str, Any]


def whole_step(*, quick: bool) -> list[Row]:
    """1,024 sequences, 48 layers, 32 micro-batches, 128 experts, 4 x 8 ranks: loads to complete plan, on all cores."""
    layers = 8 if quick else 48
    return [_in_fresh_process(_step_row, 4, 8, 128, layers, 1024, 32, 5)]


def growth(*, quick: bool) -> list[Row]:
    """Time per layer as ranks, experts and layers grow; beyond 512 ranks as expert-parallel groups of 512."""
    sizes = (1, 2, 4) if quick else (1, 2, 4, 8, 16, 32, 64)
    rows = [{"grows": "ranks", **_in_fresh_process(_step_row, nodes, 8, 512, 4, nodes * 256, 32, 1)} for nodes in sizes]
    if not quick:
        row = _in_fresh_process(_step_row, 64, 8, 512, 2, 65_536, 128, 1)
        rows.append({"grows": "ranks", **row, "ranks": 2048, "note": "4 groups of 512 ranks, 32 micro-batches each"})
    rows += [
        {"grows": "experts", **_in_fresh_process(_step_row, 4, 8, experts, 8, 1024, 32, 1)}
        for experts in ((32, 64) if quick else (32, 64, 128, 256, 512))
    ]
    rows += [
        {"grows": "layers", **_in_fresh_process(_step_row, 4, 8, 128, layers, 1024, 32, 1)}
        for layers in ((6, 12) if quick else (6, 12, 24, 48, 94))
    ]
    return rows


def _peak_mb() -> float:
    """Peak memory of this process so far (ru_maxrss would count the parent's too)."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.is_file() else None
    return int(found[1]) / 1024 if found else float("nan")


def _in_fresh_process(function: Callable[..., Row], *arguments: int) -> Row:
    """Run in a process of its own, so that its peak memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _step_row(
    nodes: int, group: int, experts: int, layers: int, sequences: int, micro_batches: int, repeats: int
) -> Row:
    """Plan a synthetic step `repeats` times and report the fastest."""
    cluster = Cluster(num_nodes=nodes, ranks_per_node=group)
    size = SynthShape(
        num_prompts=-(-sequences // 16), answers_per_prompt=16, num_layers=layers, num_experts=experts, top_k=8
    )
    # Long answers of like length, so that a cell takes one and the number of micro-batches is what was asked for.
    made = synthesize_loads(size, SynthKnobs(median_length=6000.0, length_tail=0.1, max_length=8192), seed=3)
    lengths = made.length_of_sequence
    budget = 8192 * -(-sequences // (cluster.num_ranks * micro_batches))
    rates = rates_for(MODELS["qwen3-30b-a3b"], num_nodes=nodes)
    input_mb = _peak_mb()
    seconds: list[float] = []
    plan, problem = None, None
    for _ in range(repeats + 1):
        start = perf_counter()
        problem = StepProblem(
            cluster=cluster, sequences=made, tokens_per_rank=budget, rates=rates,
            schedule=in_order(lengths, cluster, tokens_per_rank=budget),
        )  # fmt: skip
        plan = Equilibra().plan(problem)
        seconds.append(perf_counter() - start)
    assert plan is not None
    assert problem is not None
    load = problem.load_under(plan.schedule)
    ratio = imbalance(plan.rank_load(load))
    return {
        "ranks": cluster.num_ranks, "experts": experts, "layers": layers, "sequences": made.num_sequences,
        "micro_batches": plan.num_micro_batches, "seconds": min(seconds[1:]),
        "repeats": repeats, "seconds_worst": max(seconds[1:]),
        "ms_per_layer": min(seconds[1:]) / layers * 1000,
        "imbalance_static": imbalance(planner_named("static").plan(problem).rank_load(problem.load)).mean(),
        "imbalance_mean": ratio.mean(), "imbalance_p99": np.percentile(ratio, 99),
        "gap_to_bound": plan.gap(load),
        "flash_per_layer": plan.stages[Stage.UPDATE].num_copies / layers / plan.num_micro_batches,
        "standing_per_layer": plan.standing.num_copies / layers, "moves": plan.migration.num_moves,
        "peak_memory_mb": _peak_mb(), "input_memory_mb": input_mb,
    }  # fmt: skip


def plot_growth(sections: dict[str, list[Row]], folder: Path) -> None:
    """Planning time against ranks, experts and layers, where it was measured."""
    if "growth" not in sections:
        return
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, what in zip(axes, ("ranks", "experts", "layers"), strict=True):
        time = "seconds" if what == "layers" else "ms_per_layer"
        points = sorted((row[what], row[time]) for row in sections["growth"] if row["grows"] == what)
        sizes, times = zip(*points, strict=True)
        axis.loglog(sizes, times, "o-", color="#2a6f97")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        for size, value in points:
            axis.annotate(f"{value:.2g}" if value < 10 else f"{value:.0f}", (size, value), xytext=(0, 6),
                          textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        axis.margins(y=0.15)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel(what)
        axis.set_ylabel("seconds per step" if what == "layers" else "milliseconds per layer")
        axis.grid(visible=True, alpha=0.25)
    figure.suptitle("Planning time, measured on two cores")
    with atomic_file(folder / "planner-growth.png", overwrite=True) as part:
        figure.savefig(part, format="png", dpi=110)
    plt.close(figure)
