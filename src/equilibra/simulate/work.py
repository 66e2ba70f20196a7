"""Work: what a plan asks of every rank and link, exactly, before any time is put on it.

Symbols: L layers, M micro-batches, R ranks, N nodes. Rows are (token, expert) pairs. A pair whose source is not the
rank that computes it crosses NVLink inside a node, or the network across nodes, once to be dispatched and once back.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StagePlan, StepPlan

__all__ = ["LayerMoves", "StageWork", "layer_moves", "stage_work"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageWork:
    """One stage of a plan. A link's load is that of its busier direction."""

    rows_LMR: NDArray[np.float64]
    """[L, M, R] pairs that each rank computes"""
    instances_LMR: NDArray[np.float64]
    """[L, M, R] experts that each rank holds: homes, standing and flash copies"""
    inside_LMR: NDArray[np.float64]
    """[L, M, R] pairs on each rank's links inside the node"""
    across_LMR: NDArray[np.float64]
    """[L, M, R] pairs on each rank's share of the network"""
    mean_inside_LM: NDArray[np.float64]
    """[L, M] pairs inside nodes per rank, if every rank had the same"""
    mean_across_LM: NDArray[np.float64]
    """[L, M] pairs across nodes per rank, if every rank had the same"""
    flash_LMR: NDArray[np.float64]
    """[L, M, R] flash copies on each rank's links, in their busier direction"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMoves:
    """Experts that go from rank to rank once a step, on the busiest rank of each layer."""

    standing_inside_L: NDArray[np.float64]
    """[L] standing copies on the busiest rank's links inside its node"""
    standing_across_L: NDArray[np.float64]
    """[L] the same across nodes"""
    moved_inside_L: NDArray[np.float64]
    """[L] homes that move inside a node, on the busiest rank"""
    moved_across_L: NDArray[np.float64]
    """[L] the same across nodes"""
    standing_of_rank: NDArray[np.int64]
    """[R] standing copies each rank holds, all layers"""


def stage_work(plan: StepPlan, load: StepLoad, stage: Stage) -> StageWork:
    """Rows, instances and traffic of every rank, layer and micro-batch."""
    num_micro_batches, num_layers, _, num_ranks = plan.shape
    part, standing, group = plan.stages[stage], plan.standing, plan.cluster.ranks_per_node
    first_standing = np.searchsorted(standing.layer, np.arange(num_layers + 1))
    out = np.zeros((6, num_layers, num_micro_batches, num_ranks))

    def one(layer: int) -> None:
        _layer_work(
            load.tokens_MLER[:, layer], plan.placement.home_of_expert[layer], group,
            part.first_of_problem[layer * num_micro_batches : (layer + 1) * num_micro_batches + 1],
            part.expert, part.rank, part.tokens_FR,
            standing.expert, standing.rank, part.standing_tokens_CMR, first_standing[layer], first_standing[layer + 1],
            out[:, layer],
        )  # fmt: skip

    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, 8))) as pool:
        list(pool.map(one, range(num_layers)))
    rows, instances, out_inside, in_inside, out_across, in_across = out
    return StageWork(
        rows_LMR=rows,
        instances_LMR=instances,
        inside_LMR=np.maximum(out_inside, in_inside),
        across_LMR=np.maximum(out_across, in_across),
        mean_inside_LM=out_inside.mean(axis=2),
        mean_across_LM=out_across.mean(axis=2),
        flash_LMR=_flash_on_links(part, plan.shape),
    )


def _flash_on_links(part: StagePlan, shape: tuple[int, int, int, int]) -> NDArray[np.float64]:
    num_micro_batches, num_layers, _, num_ranks = shape
    problem = part.problem_of_copy() * num_ranks
    size = num_layers * num_micro_batches * num_ranks
    received = np.bincount(problem + part.rank, minlength=size)
    sent = np.bincount(problem + part.origin, minlength=size)
    return np.maximum(received, sent).reshape(num_layers, num_micro_batches, num_ranks).astype(np.float64)


def layer_moves(plan: StepPlan) -> LayerMoves:
    """What moves once a step."""
    home, before, standing = plan.placement.home_of_expert, plan.previous.home_of_expert, plan.standing
    layer, expert = np.nonzero(home != before)
    from_home = home[standing.layer, standing.expert]
    standing_inside, standing_across = _busiest(plan, standing.layer, from_home, standing.rank)
    moved_inside, moved_across = _busiest(plan, layer, before[layer, expert], home[layer, expert])
    return LayerMoves(
        standing_inside_L=standing_inside,
        standing_across_L=standing_across,
        moved_inside_L=moved_inside,
        moved_across_L=moved_across,
        standing_of_rank=np.bincount(standing.rank, minlength=plan.cluster.num_ranks),
    )


def _busiest(
    plan: StepPlan, layer: NDArray[np.integer], origin: NDArray[np.integer], target: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([L], [L]) experts on the busiest rank's links inside nodes, and across, in their busier direction."""
    num_ranks, group = plan.cluster.num_ranks, plan.cluster.ranks_per_node
    inside = origin // group == target // group
    found = []
    for chosen in (inside, ~inside):
        busy = np.zeros((2, plan.num_layers, num_ranks))
        np.add.at(busy[0], (layer[chosen], origin[chosen]), 1.0)
        np.add.at(busy[1], (layer[chosen], target[chosen]), 1.0)
        found.append(busy.max(axis=(0, 2)))
    return found[0], found[1]


@kernel
def _layer_work(  # type: ignore[no-untyped-def]
    tokens_MER, home, group, first, flash_expert, flash_rank, flash_tokens_FR,
    standing_expert, standing_rank, standing_tokens_CMR, first_standing, last_standing, out,
):  # fmt: skip
    """Fill rows, instances and the four link loads of one layer: out[6, M, R]."""
    num_micro_batches, num_experts, num_ranks = tokens_MER.shape
    for m in range(num_micro_batches):
        for e in range(num_experts):
            out[1, m, home[e]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[e], group, tokens_MER[m, e, s])
        for f in range(first[m], first[m + 1]):
            out[1, m, flash_rank[f]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[flash_expert[f]], group, -flash_tokens_FR[f, s])
                _serve(out, m, s, flash_rank[f], group, flash_tokens_FR[f, s])
        for c in range(first_standing, last_standing):
            out[1, m, standing_rank[c]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[standing_expert[c]], group, -standing_tokens_CMR[c, m, s])
                _serve(out, m, s, standing_rank[c], group, standing_tokens_CMR[c, m, s])


@inlined
def _serve(out, m, source, rank, group, pairs):  # type: ignore[no-untyped-def]
    """`rank` computes this many more pairs of `source`."""
    out[0, m, rank] += pairs
    if source != rank:
        link = 2 if source // group == rank // group else 4
        out[link, m, source] += pairs
        out[link + 1, m, rank] += pairs
