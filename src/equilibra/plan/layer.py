"""One layer for a whole step: its homes and its standing copies.

Symbols: M micro-batches, N nodes, E experts, R ranks, C standing copies of the layer.

`choose` compares two remedies for skew between nodes by their microseconds, alone and together: moving homes (weights
and optimizer state travel) and standing copies. `stay` changes nothing: every plan must beat it. `fill` makes the flash
copies and splits of a choice, and `real_cost_us` prices the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StagePlan, StandingCopies
from equilibra.cost.rates import Rates
from equilibra.plan.level import level_micro_batches
from equilibra.plan.micro_batch import CopyCosts, balance_micro_batches, scratch_for
from equilibra.plan.reorder import quantized, reorder_bins
from equilibra.plan.stand import choose_standing_copies

BUSIEST_OVER_MEAN = 8
"""slowdown of moving homes over links that are evenly loaded and otherwise idle"""
PAYBACK_FACTOR = 4
"""traffic that a standing copy must save, in multiples of its own transfer"""
GOOD_ENOUGH = 1.0005
"""slowest node over mean node at which the search for standing copies stops"""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How homes and standing copies are searched for."""

    reorder: bool = True
    """move homes between steps"""
    work: int = 3_000_000
    """search budget for homes per layer: swaps tried times micro-batches"""
    exchange_rounds: int = 1
    """rounds in which every standing copy is tried against others"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProblem:
    """One layer of a step."""

    load: StepLoad
    layer: int
    home: NDArray[np.int32]
    """[E] homes before the step"""
    cluster: Cluster
    rates: Rates
    limits: PlanLimits
    search: Search

    @cached_property
    def load_EM(self) -> NDArray[np.int64]:
        """[E, M] tokens of each expert."""
        return np.ascontiguousarray(self.load.tokens_MLER[:, self.layer].sum(axis=2, dtype=np.int64).T)

    @cached_property
    def near_NEM(self) -> NDArray[np.int64] | None:
        """[N, E, M] tokens of each expert whose source is on the node; None if traffic across nodes costs nothing."""
        if self.cluster.num_nodes == 1 or self.rates.cross_row_us == 0:
            return None
        tokens_MER = self.load.tokens_MLER[:, self.layer]
        by_node = tokens_MER.reshape(*tokens_MER.shape[:2], self.cluster.num_nodes, self.cluster.ranks_per_node)
        return np.ascontiguousarray(by_node.sum(axis=3, dtype=np.int64).transpose(2, 1, 0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Homes and standing copies of one layer for a step, and their cost."""

    home_of_expert: NDArray[np.int32]
    """[E]"""
    standing_expert: NDArray[np.int64]
    """[C] sorted by expert, then node"""
    standing_node: NDArray[np.int64]
    """[C]"""
    rows_us: float
    """compute of the slowest node (rank, if nothing levels them), summed over micro-batches and both stages"""
    traffic_us: float
    """pairs that the slowest node receives from others, summed over micro-batches"""
    moving_us: float
    """transfers of standing copies and moved homes, once a step"""

    @property
    def cost_us(self) -> float:
        return self.rows_us + self.traffic_us + self.moving_us


def choose(problem: LayerProblem) -> Choice:
    """The cheaper of keeping and moving homes, each with standing copies."""
    best = _stand(problem, problem.home, problem.limits)
    if not problem.search.reorder or (problem.cluster.num_nodes == 1 and problem.limits.spare_slots > 0):
        return best
    moved = _reorder(problem)
    if np.array_equal(moved, problem.home):
        return best
    other = _stand(problem, moved, problem.limits)
    return other if other.cost_us < best.cost_us else best


def stay(problem: LayerProblem) -> Choice:
    """No change: what every other choice must beat."""
    return _stand(problem, problem.home, PlanLimits(standing_slots=0, spare_slots=0))


def fill(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], costs: CopyCosts, row_slack: float
) -> StagePlan:
    """Flash copies and splits of every micro-batch. standing_rank [C] of standing copies; row_slack: see `across`."""
    load, cluster, slots = problem.load, problem.cluster, problem.limits.spare_slots
    scratch = scratch_for(cluster, choice.home_of_expert, slots, choice.standing_expert, standing_rank)
    standing_MCR = np.zeros((load.num_micro_batches, choice.standing_expert.size, cluster.num_ranks), np.int32)
    flash = balance_micro_batches(
        load.tokens_MLER, problem.layer, scratch, cluster, slots, costs, row_slack, standing_MCR
    )
    expert, rank, origin = flash.copies[:3].astype(np.int32)
    return StagePlan(
        first_of_problem=flash.first_of_micro_batch, expert=expert, rank=rank, origin=origin,
        tokens_FR=flash.tokens_FR.copy(),
        standing_tokens_CMR=np.ascontiguousarray(standing_MCR.transpose(1, 0, 2)),
    )  # fmt: skip


def real_cost_us(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], copies: dict[Stage, StagePlan]
) -> float:
    """Cost of a choice by the loads of ranks instead of nodes.

    Each stage costs the time of the slowest rank, with the copies it holds and serves, and the exposed part of the
    busiest link's flash copies: a small share, or all that exceeds the time of the layer.
    """
    rates = problem.rates
    standing = StandingCopies(
        layer=np.zeros(standing_rank.size, np.int32), expert=choice.standing_expert.astype(np.int32),
        rank=standing_rank.astype(np.int32),
    )  # fmt: skip
    cost_us = choice.traffic_us + choice.moving_us
    for stage in Stage:
        part = copies[stage]
        rows_MR = part.rank_rows(problem.load_EM.T[:, None], choice.home_of_expert[None], standing)[0]
        received, sent = part.on_links()
        busiest = np.maximum(received, sent).max(axis=1)
        held_us = (received + part.standing_in_use(standing)) * rates.hold_us[stage]
        rows_us = (rows_MR * rates.row_us[stage] + (held_us + sent * rates.serve_us[stage])).max(axis=1)
        gap_us = rows_us + rates.gap_us[stage] + rows_MR.mean(axis=1) * rates.gap_row_us[stage]
        too_long_us = busiest * rates.link_us[stage] - gap_us
        exposed_us = np.maximum(busiest * rates.exposed_share * rates.flash_copy_us[stage], too_long_us)
        cost_us += float(rows_us.sum() + exposed_us.sum())
    return cost_us


def _stand(problem: LayerProblem, home: NDArray[np.int32], limits: PlanLimits) -> Choice:
    cluster, rates, load_EM = problem.cluster, problem.rates, problem.load_EM
    group = cluster.ranks_per_node
    # Copies and moves of all nodes travel at the same time, each rank on its own link.
    copy_us = rates.standing_copy_us / cluster.num_ranks
    slots = min(limits.standing_slots, home.size) if cluster.num_nodes > 1 else 0
    by_rank = slots == 0 and limits.spare_slots == 0
    bins = (home if by_rank else home // group).astype(np.int64)
    num_bins = cluster.num_ranks if by_rank else cluster.num_nodes
    expert, node = np.zeros((2, num_bins * slots + 1), np.int64)
    mean = -(-load_EM.sum(axis=0) // num_bins)
    held_us = load_EM.shape[1] * sum(rates.hold_us.values()) / cluster.num_ranks  # once levelled over all ranks
    load_BM = np.zeros((num_bins, load_EM.shape[1]), np.int64)
    np.add.at(load_BM, bins, load_EM)
    n, slowest = 0, int(load_BM.max(axis=0).sum())
    if slots and num_bins > 1:
        n, slowest = choose_standing_copies(
            load_EM, bins, num_bins, slots, int((copy_us + held_us) * group / rates.step_row_us),
            int(mean.sum() * GOOD_ENOUGH), problem.search.exchange_rounds, expert, node,
        )  # fmt: skip
    if slots and problem.near_NEM is not None:
        n = _add_for_traffic(problem, bins, slots, n, expert, node)
    across = np.count_nonzero(home // group != problem.home // group)
    inside = np.count_nonzero(home != problem.home) - across
    moves_us = BUSIEST_OVER_MEAN * (across * rates.move_us + inside * rates.move_inside_us) / cluster.num_ranks
    choice = Choice(
        home_of_expert=home,
        standing_expert=expert[:n].copy(),
        standing_node=node[:n].copy(),
        rows_us=slowest * rates.step_row_us * num_bins / cluster.num_ranks + n * held_us,
        traffic_us=0.0,
        moving_us=n * copy_us + moves_us,
    )
    return choice if problem.near_NEM is None else replace(choice, traffic_us=_traffic_us(problem, choice))


def _add_for_traffic(
    problem: LayerProblem, home_node: NDArray[np.int64], slots: int, n: int,
    expert: NDArray[np.int64], node: NDArray[np.int64],
) -> int:  # fmt: skip
    """Fill free standing slots with the experts that the node's tokens use most; returns the number of all copies.

    Such a copy pays if the tokens that it keeps on their node would cost several times its own transfer.
    """
    assert problem.near_NEM is not None
    rates, group = problem.rates, problem.cluster.ranks_per_node
    near_NE = problem.near_NEM.sum(axis=2)
    held_us = problem.load_EM.shape[1] * sum(rates.hold_us.values())
    pays = (PAYBACK_FACTOR * rates.standing_copy_us * group + held_us) / rates.cross_row_us
    held = {(int(e), int(k)) for e, k in zip(expert[:n], node[:n], strict=True)}
    for k in range(problem.cluster.num_nodes):
        free = slots - sum(of == k for _, of in held)
        away_E = np.where(home_node == k, 0, near_NE[k])
        for e in np.argsort(-away_E, kind="stable").tolist():
            if free <= 0 or away_E[e] <= pays:
                break
            if (e, k) not in held:
                held.add((e, k))
                free -= 1
    for c, (e, k) in enumerate(sorted(held)):
        expert[c], node[c] = e, k
    return len(held)


def _traffic_us(problem: LayerProblem, choice: Choice) -> float:
    """Cost of the pairs that enter a node: those it serves less those from its own ranks."""
    assert problem.near_NEM is not None
    load_EM, group = problem.load_EM, problem.cluster.ranks_per_node
    home_node = choice.home_of_expert.astype(np.int64) // group
    expert, node = choice.standing_expert, choice.standing_node
    shares_CM = level_micro_batches(load_EM, home_node, problem.cluster.num_nodes, expert, node, problem.near_NEM)
    served_NEM = np.zeros_like(problem.near_NEM)
    served_NEM[home_node, np.arange(home_node.size)] = load_EM
    for c in range(expert.size):
        served_NEM[home_node[expert[c]], expert[c]] -= shares_CM[c]
        served_NEM[node[c], expert[c]] += shares_CM[c]
    across_NM = np.maximum(served_NEM - problem.near_NEM, 0).sum(axis=1)
    return float(across_NM.max(axis=0).sum()) * problem.rates.cross_row_us / group


def _reorder(problem: LayerProblem) -> NDArray[np.int32]:
    """Homes by swap search, over nodes if flash copies level their ranks, else over ranks."""
    cluster, rates, limits, load_EM = problem.cluster, problem.rates, problem.limits, problem.load_EM
    per_bin = 1 if limits.spare_slots == 0 else cluster.ranks_per_node
    bins = (problem.home // per_bin).astype(np.int64)
    num_bins = cluster.num_ranks // per_bin
    if np.unique(np.bincount(bins, minlength=num_bins)).size > 1:
        return problem.home  # uneven homes, as EPLB leaves them: swaps would keep them uneven
    time_BEM = np.broadcast_to(load_EM * (rates.step_row_us / per_bin), (num_bins, *load_EM.shape)).copy()
    if problem.near_NEM is not None:
        away_NEM = load_EM - problem.near_NEM
        time_BEM += np.repeat(away_NEM, num_bins // cluster.num_nodes, axis=0) * (rates.cross_row_us / per_bin)
    whole_BEM, unit = quantized(time_BEM)
    move_us = BUSIEST_OVER_MEAN * (rates.move_us if cluster.num_nodes > 1 else rates.move_inside_us) / cluster.num_ranks
    num_micro_batches = load_EM.shape[1]
    base = np.zeros((num_bins, num_micro_batches), np.int32)
    swaps = problem.search.work // max(num_micro_batches, 16) + 1  # below 16 a swap costs no less
    seed = limits.seed + problem.layer
    price = int(min(move_us / unit, 2.0**30))  # all times together are below 2^30: no move is worth more
    new_bins, _ = reorder_bins(bins, base, whole_BEM, price, swaps, seed, limits.max_moves_per_layer)
    return _slots_exchanged(problem.home, bins, new_bins)


def _slots_exchanged(
    home: NDArray[np.int32], bins: NDArray[np.int64], new_bins: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Ranks for the new bins: an expert that enters a bin takes the rank of one that leaves it."""
    moved = np.flatnonzero(bins != new_bins)
    result = home.copy()
    for b in np.unique(new_bins[moved]):
        result[moved[new_bins[moved] == b]] = home[moved[bins[moved] == b]]
    return result
