"""What a step costs under the rates, written as loops: the reference for "never worse than static"."""

from __future__ import annotations

from typing import Any

from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.rates import Rates


def rank_rows(plan: StepPlan, load: StepLoad, stage: Stage) -> dict[tuple[int, int], list[int]]:
    """Rows that every rank computes, by (layer, micro-batch)."""
    num_micro_batches, num_layers, num_experts, num_ranks = load.tokens_MLER.shape
    part = plan.stages[stage]
    rows: dict[tuple[int, int], list[int]] = {}
    for layer in range(num_layers):
        for m in range(num_micro_batches):
            here = [0] * num_ranks
            for e in range(num_experts):
                here[plan.placement.home_of_expert[layer, e]] += int(load.tokens_MLER[m, layer, e].sum())
            problem = layer * num_micro_batches + m
            for f in range(part.first_of_problem[problem], part.first_of_problem[problem + 1]):
                tokens = int(part.tokens_FR[f].sum())
                here[plan.placement.home_of_expert[layer, part.expert[f]]] -= tokens
                here[part.rank[f]] += tokens
            rows[layer, m] = here
    for c in range(plan.standing.num_copies):
        layer = int(plan.standing.layer[c])
        for m in range(num_micro_batches):
            tokens = int(part.standing_tokens_CMR[c, m].sum())
            rows[layer, m][plan.placement.home_of_expert[layer, plan.standing.expert[c]]] -= tokens
            rows[layer, m][plan.standing.rank[c]] += tokens
    return rows


def prices_us(plan: StepPlan, load: StepLoad, stage: Stage, rates: Rates) -> dict[tuple[int, int], list[float]]:
    """What copies cost every rank besides rows, by (layer, micro-batch): those it holds and those it serves."""
    part, num_micro_batches = plan.stages[stage], load.num_micro_batches
    cells = [(layer, m) for layer in range(load.num_layers) for m in range(num_micro_batches)]
    prices = {cell: [0.0] * plan.cluster.num_ranks for cell in cells}
    for problem, cell in enumerate(cells):
        for f in range(part.first_of_problem[problem], part.first_of_problem[problem + 1]):
            prices[cell][part.rank[f]] += rates.hold_us[stage]
            prices[cell][part.origin[f]] += rates.serve_us[stage]
    for c in range(plan.standing.num_copies):
        for m in range(num_micro_batches):
            if part.standing_tokens_CMR[c, m].sum() > 0:
                prices[int(plan.standing.layer[c]), m][plan.standing.rank[c]] += rates.hold_us[stage]
    return prices


def busiest_link(plan: StepPlan, stage: Stage, problem: int) -> int:
    """Flash copies that the busiest rank receives, or sends, for one layer and micro-batch."""
    part = plan.stages[stage]
    received = [0] * plan.cluster.num_ranks
    sent = [0] * plan.cluster.num_ranks
    for f in range(part.first_of_problem[problem], part.first_of_problem[problem + 1]):
        received[part.rank[f]] += 1
        sent[part.origin[f]] += 1
    return max(*received, *sent)


def pairs_into_nodes(plan: StepPlan, load: StepLoad, stage: Stage, layer: int, m: int) -> list[int]:
    """Pairs that each node serves for sources on other nodes."""
    group, num_ranks = plan.cluster.ranks_per_node, plan.cluster.num_ranks
    part = plan.stages[stage]
    into = [0] * plan.cluster.num_nodes
    left = load.tokens_MLER[m, layer].astype(int)  # [E, R], in the end what homes serve

    def serve(tokens_R: Any, rank: int) -> None:
        for r in range(num_ranks):
            if r // group != rank // group:
                into[rank // group] += int(tokens_R[r])

    problem = layer * load.num_micro_batches + m
    for f in range(part.first_of_problem[problem], part.first_of_problem[problem + 1]):
        serve(part.tokens_FR[f], int(part.rank[f]))
        left[part.expert[f]] -= part.tokens_FR[f]
    for c in range(plan.standing.num_copies):
        if plan.standing.layer[c] == layer:
            serve(part.standing_tokens_CMR[c, m], int(plan.standing.rank[c]))
            left[plan.standing.expert[c]] -= part.standing_tokens_CMR[c, m]
    assert left.min() >= 0
    for e in range(load.num_experts):
        serve(left[e], int(plan.placement.home_of_expert[layer, e]))
    return into


def step_cost_us(plan: StepPlan, load: StepLoad, rates: Rates) -> float:
    """Slowest ranks of both stages, flash copies as far as exposed, traffic across nodes, standing copies, moves."""
    num_micro_batches = load.num_micro_batches
    num_ranks = plan.cluster.num_ranks
    total = 0.0
    for stage in Stage:
        copies_us = prices_us(plan, load, stage, rates)
        for (layer, m), rows in rank_rows(plan, load, stage).items():
            total += max(r * rates.row_us[stage] + us for r, us in zip(rows, copies_us[layer, m], strict=True))
            copies = busiest_link(plan, stage, layer * num_micro_batches + m)
            total += copies * rates.exposed_share * rates.flash_copy_us[stage]
    if rates.cross_row_us:
        for layer in range(load.num_layers):
            for m in range(num_micro_batches):
                into = pairs_into_nodes(plan, load, Stage.UPDATE, layer, m)
                total += max(into) * rates.cross_row_us / plan.cluster.ranks_per_node
    # Copies and moves of all ranks travel at the same time, each on its own link.
    migration = plan.migration
    per_node = plan.cluster.ranks_per_node
    across = sum(source // per_node != target // per_node for _, _, source, target in migration.moves().tolist())
    total += plan.standing.num_copies * rates.standing_copy_us / num_ranks
    total += (across * rates.move_us + (migration.num_moves - across) * rates.move_inside_us) / num_ranks
    return total
