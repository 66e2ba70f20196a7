"""Whole steps: timed from loads of sequences to a complete StepPlan, each in a fresh process for its peak memory; and
planners and mechanisms side by side on real routing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.problems import MIDDLE, SMALL, file_order_load, flash_per_layer, sequences_of
from benchmarks.suite import Row, Setting
from equilibra.core.load import imbalance
from equilibra.core.model import MODELS
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.pack import in_order
from equilibra.plan.planner import Planner, StepProblem, planner_named, planner_names
from equilibra.plan.step import Equilibra
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads


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
    """Run in a fresh process, so that its peak memory is its own."""
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
    # Long answers of similar length, so that the budget gives the requested number of micro-batches.
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


def ablation(setting: Setting) -> list[Row]:
    """Static, LPT, reorder, + flash, + standing, + pack on real routing; moves and copies beside the balance."""
    rows = []
    steps: list[tuple[str, Planner]] = [
        ("static", planner_named("static")),
        ("LPT", planner_named("lpt")),
        ("reorder", Equilibra(pack=False, standing=False, flash=False)),
        ("+ flash", Equilibra(pack=False, standing=False)),
        ("+ standing", Equilibra(pack=False)),
        ("+ pack", Equilibra()),
        ("balanced", planner_named("balanced")),
    ]
    cases = (
        ("gpt-oss-20b", "gpt-oss-20b", 2),
        ("gpt-oss-20b", "gpt-oss-20b", 4),
        ("dsv2-lite-intent", "moonlight", 2),
        ("dsv2-lite-law", "moonlight", 1),
    )
    for name, model_name, nodes in cases:
        cluster, sequences = Cluster(num_nodes=nodes, ranks_per_node=8), sequences_of(setting, name)
        budget = int(sequences.length_of_sequence.max())
        problem = StepProblem(
            cluster=cluster, sequences=sequences, tokens_per_rank=budget, rates=Rates.free(),
            schedule=in_order(sequences.length_of_sequence, cluster, tokens_per_rank=budget),
        )  # fmt: skip
        model = MODELS[model_name]
        for label, planner in steps:
            plan = planner.plan(problem)
            load = problem.load_under(plan.schedule)
            ratio = imbalance(plan.rank_load(load))
            rows.append({
                "trace": name, "bytes_of": model.name, "nodes": nodes, "ranks_per_node": 8, "step": label,
                "micro_batches": plan.num_micro_batches,
                "imbalance_mean": ratio.mean(), "imbalance_p99": np.percentile(ratio, 99),
                "slowest_over_bound": 1 + plan.gap(load),
                "moves": plan.migration.num_moves,
                "move_gb": plan.migration.num_moves * model.expert_home_bytes / 1e9,
                "standing_per_layer": plan.standing.num_copies / plan.num_layers,
                "standing_gb": plan.standing.num_copies * (model.expert_bytes + model.expert_gradient_bytes) / 1e9,
                "flash_per_layer": flash_per_layer(plan),
                "flash_gb": (
                    plan.stages[Stage.LOGPROB].num_copies * model.expert_bytes
                    + plan.stages[Stage.UPDATE].num_copies * (model.expert_bytes + model.expert_gradient_bytes)
                ) / 1e9,
            })  # fmt: skip
    return rows


def planners(setting: Setting) -> list[Row]:
    """Every planner on the same real routing."""
    rows = []
    cases = (
        ("gpt-oss-20b", 1, MIDDLE),
        ("gpt-oss-20b", 2, MIDDLE),
        ("gpt-oss-20b", 4, MIDDLE),
        ("dsv2-lite-law", 4, SMALL),
    )
    for name, nodes, tokens in cases:
        cluster = Cluster(num_nodes=nodes, ranks_per_node=8)
        load = file_order_load(sequences_of(setting, name), cluster, tokens)
        history_LE = load.expert_load()[: max(load.num_micro_batches // 2, 1)].sum(axis=0)
        problem = StepProblem(cluster=cluster, given_load=load, rates=Rates.free(), history_LE=history_LE)
        for planner in (planner_named(each) for each in planner_names()):
            planner.plan(problem)
            start = perf_counter()
            plan = planner.plan(problem)
            seconds = perf_counter() - start
            ratio = imbalance(plan.rank_load(load))
            rows.append({
                "trace": name, "nodes": nodes, "ranks_per_node": 8, "tokens": tokens, "planner": planner.name,
                "imbalance_mean": ratio.mean(), "imbalance_p99": np.percentile(ratio, 99),
                "flash_per_layer": flash_per_layer(plan),
                "standing_per_layer": plan.standing.num_copies / plan.num_layers,
                "moves": plan.migration.num_moves,
                "us_per_problem": seconds * 1e6 / plan.num_layers / plan.num_micro_batches,
            })  # fmt: skip
    return rows
