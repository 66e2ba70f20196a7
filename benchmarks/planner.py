"""The planner bench: every figure that the planner promises, measured, beside its requirement.

Each section is a function from a `Setting` to rows (plain dicts): copies on Zipf loads, copies on real routing, several
nodes, small instances against an exact solver, an ablation, the speed of counting a recording, whole steps and growth.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from benchmarks.plots import plot_growth
from benchmarks.problems import (
    LARGE,
    MIDDLE,
    SMALL,
    file_order_load,
    flash_per_layer,
    over_optimum,
    sequences_of,
    zipf_loads,
)
from benchmarks.steps import ablation, growth, planners, whole_step
from benchmarks.suite import Row, Setting, Suite
from equilibra.core.load import StepLoad, imbalance
from equilibra.core.placement import Cluster
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates
from equilibra.plan.entry import over_sources, solve_problems
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.plan.step import Equilibra
from equilibra.trace.count import sequence_loads
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize


def flash_zipf(setting: Setting) -> list[Row]:
    """Flash copies on Zipf loads in one node."""
    rows = []
    for num_ranks, num_experts, tolerance, most in (
        (64, 256, 0.01, {1.5: 36, 2.0: 40, 3.0: 44}),
        (64, 256, 0.005, {1.5: None, 2.0: None, 3.0: None}),
        (8, 128, 0.005, {1.5: None, 2.0: None, 3.0: None}),
    ):
        for start, copies in most.items():
            loads = np.stack([
                zipf_loads(num_ranks=num_ranks, num_experts=num_experts, start=start, seed=seed)
                for seed in range(5 if setting.quick else 50)
            ])  # fmt: skip
            solved = solve_problems(
                over_sources(loads, num_ranks), cluster=Cluster(ranks_per_node=num_ranks), spare_slots=2,
                tolerance=tolerance, passes=9,
            )  # fmt: skip
            rows.append({
                "ranks": num_ranks, "experts": num_experts, "start": start, "tolerance": tolerance,
                "problems": len(loads),
                "imbalance_mean": solved.imbalance_after.mean(), "imbalance_worst": solved.imbalance_after.max(),
                "copies_mean": solved.copies.mean(), "copies_reach": copies,
                "largest_fan_out": int(solved.largest_fan_out.max()),
                "solve_us_median": np.median(solved.solve_us), "solve_us_p90": np.percentile(solved.solve_us, 90),
                "solve_us_reach": 20 if num_ranks == 64 else 5,
            })  # fmt: skip
    return rows


def flash_real(setting: Setting) -> list[Row]:
    """Flash copies on gpt-oss-20b in file order, one node of 8."""
    rows = []
    sequences = sequences_of(setting, "gpt-oss-20b")
    for tokens in (SMALL, MIDDLE, LARGE):
        for tolerance in (0.005, 0.0):
            load = file_order_load(sequences, Cluster(ranks_per_node=8), tokens)
            problems = load.tokens_MLER.reshape(-1, *load.tokens_MLER.shape[2:])
            solved = solve_problems(problems, cluster=Cluster(ranks_per_node=8), spare_slots=2, tolerance=tolerance)
            rows.append({
                "trace": "gpt-oss-20b", "ranks": 8, "tokens": tokens, "tolerance": tolerance,
                "problems": len(problems),
                "imbalance_before": solved.imbalance_before.mean(), "imbalance_mean": solved.imbalance_after.mean(),
                "imbalance_p99": np.percentile(solved.imbalance_after, 99),
                "imbalance_worst": solved.imbalance_after.max(),
                "copies_mean": solved.copies.mean(), "solve_us_median": np.median(solved.solve_us),
                "mean_reach": 1.003, "p99_reach": 1.01,
            })  # fmt: skip
    return rows


def several_nodes(setting: Setting) -> list[Row]:
    """Reorder and flash copies against a long search; then standing copies, on real routing."""
    rows = []
    cases = [("gpt-oss-20b", 2, 8), ("gpt-oss-20b", 4, 8), ("gpt-oss-20b", 8, 4)]
    cases += [(name, *shape) for name in ("dsv2-lite-law", "dsv2-lite-intent") for shape in ((2, 8), (4, 8), (8, 4))]
    for name, nodes, group in cases:
        sequences, cluster = sequences_of(setting, name), Cluster(num_nodes=nodes, ranks_per_node=group)
        for tokens in (SMALL, MIDDLE):
            load = file_order_load(sequences, cluster, tokens)
            problem = StepProblem(cluster=cluster, given_load=load, rates=Rates.free())
            both = Equilibra(standing=False).plan(problem)
            work = Equilibra().work * (2 if setting.quick else 40)
            slowest = [
                _slowest(Equilibra(standing=False, work=work).plan(_with_seed(problem, seed)), load)
                for seed in range(1 if setting.quick else 3)
            ]
            standing = Equilibra().plan(problem)
            ratio = imbalance(standing.rank_load(load))
            rows.append({
                "trace": name, "nodes": nodes, "ranks_per_node": group, "tokens": tokens,
                "micro_batches": load.num_micro_batches,
                "imbalance_static": imbalance(planner_named("static").plan(problem).rank_load(load)).mean(),
                "imbalance_reorder_flash": imbalance(both.rank_load(load)).mean(),
                "over_long_search": _slowest(both, load) / min(slowest) - 1, "over_long_search_reach": 0.01,
                "imbalance_standing": ratio.mean(), "imbalance_standing_p99": np.percentile(ratio, 99),
                "imbalance_standing_reach": 1.02 if nodes == 8 else 1.01,
                "imbalance_bound": _bound(standing, load),
                "slowest_over_bound": 1 + standing.gap(load),
                "standing_per_node_layer": standing.standing.num_copies / load.num_layers / nodes,
                "flash_per_layer": flash_per_layer(standing),
            })  # fmt: skip
    return rows


def exact_small(setting: Setting) -> list[Row]:
    """Small instances against HiGHS."""
    over = np.array(over_optimum(20 if setting.quick else 500))
    return [{
        "instances": over.size, "mean_over_optimal": over.mean(), "worst_over_optimal": over.max(),
        "optimal_share": float(np.mean(over <= 1e-9)), "mean_reach": 0.01, "worst_reach": 0.05,
    }]  # fmt: skip


def counting(setting: Setting) -> list[Row]:
    """Per-sequence loads from a recording in memory, one core."""
    rows = []
    for name, layers, experts, top_k in (
        ("qwen3-30b-a3b", 48, 128, 8),
        ("kimi-k2", 60, 384, 8),
        ("gpt-oss-20b", 24, 32, 4),
    ):
        size = SynthShape(
            num_prompts=4 if setting.quick else 32,
            answers_per_prompt=4,
            num_layers=layers,
            num_experts=experts,
            top_k=top_k,
        )
        trace = synthesize(size, SynthKnobs(median_length=2000.0), seed=1)
        seconds = []
        for _ in range(4):
            start = perf_counter()
            sequence_loads(trace)
            seconds.append(perf_counter() - start)
        ids = trace.num_tokens * layers * top_k
        rows.append({
            "shape": name, "ids": ids, "million_ids_per_s": ids / min(seconds[1:]) / 1e6, "reach": 500,
        })  # fmt: skip
    return rows


def _with_seed(problem: StepProblem, seed: int) -> StepProblem:
    return StepProblem(cluster=problem.cluster, given_load=problem.load, rates=problem.rates, seed=seed)


def _slowest(plan: StepPlan, load: StepLoad) -> int:
    return int(plan.rank_load(load).max(axis=2).sum())


def _bound(plan: StepPlan, load: StepLoad) -> float:
    """Mean imbalance if every slowest rank were at its lower bound, which whole tokens alone force."""
    mean_LM = plan.rank_load(load).mean(axis=2)
    return float(np.mean(plan.bound_LM / np.maximum(mean_LM, 1e-300)))


TITLES = {
    "flash_zipf": "Flash copies, Zipf loads, one node, 2 spare slots (measured)",
    "flash_real": "Flash copies, gpt-oss-20b in file order, one node of 8 ranks, 2 spare slots (measured)",
    "several_nodes": "Several nodes, real routing in file order (measured)",
    "whole_step": "A whole step: loads of sequences to complete StepPlan (measured)",
    "exact_small": "Small instances against an exact MILP, HiGHS (measured)",
    "ablation": "Ablation on real routing; bytes follow from the model's expert size (measured balance)",
    "planners": "Every planner on the same real routing in file order, 2 spare slots (measured). eplb-history knows "
    "the first half of the same step. EPLB and LPLB hold their copies for all layers at once, flash copies exist for "
    "one layer at a time",
    "counting": "Loads from a recording, one core (measured)",
    "growth": "Growth of planning time (measured)",
}
NOTES = {
    "several_nodes": "`over_long_search`: slowest ranks over those of the best of three searches with forty times the "
    "work. `imbalance_bound`: the mean imbalance that whole tokens alone force. Only dsv2-lite-intent at 8,192 tokens "
    "misses its requirement, because of this bound: its second micro-batch has some thirty tokens for 32 ranks. "
    "Weighted by tokens (`slowest_over_bound`) it is 0.2 % above the bound, within the tolerance.",
    "ablation": "Copies and moves are free here, so that each mechanism does all it can; at the prices of real "
    "experts fewer homes move. `flash_gb`: weights in both stages and gradients back. `bytes_of`: the model whose "
    "expert size is used (moonlight stands in for the dsv2-lite recordings). Pack lowers the waiting in attention and "
    "the number of micro-batches; it may cost a tenth of a percent of expert balance.",
    "growth": "2,048 ranks are four expert-parallel groups of 512: there are no more homes than experts. The groups' "
    "micro-batches are planned one after another.",
}
PLANNER = Suite(
    name="planner",
    title="Planner bench",
    intro="`reach` columns are requirements; empty ones have none.",
    sections={
        "flash_zipf": flash_zipf,
        "flash_real": flash_real,
        "several_nodes": several_nodes,
        "whole_step": lambda setting: whole_step(quick=setting.quick),
        "exact_small": exact_small,
        "ablation": ablation,
        "planners": planners,
        "counting": counting,
        "growth": lambda setting: growth(quick=setting.quick),
    },
    titles=TITLES,
    notes=NOTES,
    need_traces=frozenset({"flash_real", "several_nodes", "ablation", "planners"}),
    need_modules={"exact_small": "scipy"},
    plot=plot_growth,
)
