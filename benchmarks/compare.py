"""Planners and mechanisms side by side on real routing."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from benchmarks.problems import file_order_load
from benchmarks.setting import MIDDLE, SMALL, Row, Setting, flash_per_layer, sequences_of
from equilibra.core.cluster import Cluster
from equilibra.core.model import MODELS
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.events.imbalance import imbalance
from equilibra.plan.pack import in_order
from equilibra.plan.planner import Planner, StepProblem, planner_named, planner_names
from equilibra.plan.step import Equilibra

__all__ = ["ablation", "planners"]


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
