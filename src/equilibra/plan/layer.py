"""One layer, all its micro-batches: homes and standing copies for the step, then flash copies and splits.

Symbols: M micro-batches, N nodes, E experts, R ranks, C standing copies of the layer, F flash copies.

`choose` decides what holds for the whole step. It weighs two ways out of a skew between nodes in one currency,
microseconds: moving homes (reorder: weights and optimizer state travel) and standing copies (weights travel, gradients
return), and both together; the cheapest wins. Standing still is always a candidate, so no choice costs more than
staying as we are. `fill` then balances every micro-batch under that choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.kernel import kernel
from equilibra.core.load import StepLoad
from equilibra.cost.rates import Rates
from equilibra.plan.micro_batch import EXPERT, ORIGIN, TARGET, TRIES, balance_micro_batch, bench_for
from equilibra.plan.reorder import quantized, reorder_bins
from equilibra.plan.stand import choose_standing_copies

__all__ = ["Choice", "LayerCopies", "Means", "choose", "fill"]

GOOD_ENOUGH = 1.0005
"""slowest node over mean node at which no more standing copies are sought"""


@dataclass(frozen=True, kw_only=True)
class Means:
    """What the planner may use, and how hard it searches."""

    reorder: bool = True
    """move homes between steps"""
    standing_slots: int = 2
    """standing copies a node may hold per layer; 0 switches them off"""
    spare_slots: int = 2
    """flash copies a rank may hold; 0 switches them off"""
    tolerance: float = 0.005
    """imbalance accepted for fewer copies"""
    work: int = 4_000_000
    """how long to search for homes: swaps weighed times micro-batches, per layer"""
    max_moves: int = -1
    """homes that may move per layer, -1 for any number"""
    exchange_rounds: int = 1
    """how often every standing copy is tried against others"""
    seed: int = 0
    """of the search for homes"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What holds for the whole step in one layer."""

    home_of_expert: NDArray[np.int32]
    """[E]"""
    standing_expert: NDArray[np.int64]
    """[C] sorted by expert, then node"""
    standing_node: NDArray[np.int64]
    """[C]"""
    cost_us: float
    """slowest nodes over all micro-batches, copies and moves"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCopies:
    """Flash copies of one layer in the order of micro-batches."""

    num_of_micro_batch: NDArray[np.int64]
    """[M]"""
    expert: NDArray[np.int32]
    """[F]"""
    rank: NDArray[np.int32]
    """[F]"""
    origin: NDArray[np.int32]
    """[F]"""
    tokens_FR: NDArray[np.int32]
    """[F, R]"""
    standing_tokens_CMR: NDArray[np.int32]
    """[C, M, R]"""


def choose(load: StepLoad, layer: int, home: NDArray[np.int32], cluster: Cluster, rates: Rates, means: Means) -> Choice:
    """Homes and standing copies of one layer."""
    load_EM = np.ascontiguousarray(load.tokens_MLER[:, layer].sum(axis=2, dtype=np.int64).T)
    best = _stand(load_EM, home, home, cluster, rates, means)
    flat = cluster.num_nodes == 1
    if not means.reorder or (flat and means.spare_slots > 0):
        return best
    moved = _reorder(load, layer, load_EM, home, cluster, rates, means)
    if np.array_equal(moved, home):
        return best
    other = _stand(load_EM, moved, home, cluster, rates, means)
    return other if other.cost_us < best.cost_us else best


def _stand(
    load_EM: NDArray[np.int64],
    home: NDArray[np.int32],
    before: NDArray[np.int32],
    cluster: Cluster,
    rates: Rates,
    means: Means,
) -> Choice:
    """Standing copies for given homes, and what all of it costs."""
    num_nodes, group = cluster.num_nodes, cluster.ranks_per_node
    # Copies and moves of all nodes travel at the same time, each rank on its own link.
    copy_us = rates.standing_copy_us / cluster.num_ranks
    node_row_us = rates.step_row_us / group
    slots = means.standing_slots if num_nodes > 1 else 0
    by_rank = slots == 0 and means.spare_slots == 0
    bins = home if by_rank else home // group
    num_bins = cluster.num_ranks if by_rank else num_nodes
    expert, node = np.zeros((2, num_bins * slots + 1), np.int64)
    mean = -(-load_EM.sum(axis=0) // num_bins)
    n, slowest = choose_standing_copies(
        load_EM, bins.astype(np.int64), num_bins, slots, int(copy_us / node_row_us),
        int(mean.sum() * GOOD_ENOUGH), means.exchange_rounds, expert, node,
    )  # fmt: skip
    cost_us = slowest * rates.step_row_us * (num_bins / cluster.num_ranks) + n * copy_us
    across = np.count_nonzero(home // group != before // group)
    inside = np.count_nonzero(home != before) - across
    cost_us += (across * rates.move_us + inside * rates.move_inside_us) / cluster.num_ranks
    return Choice(
        home_of_expert=home, standing_expert=expert[:n].copy(), standing_node=node[:n].copy(), cost_us=cost_us
    )


def _reorder(
    load: StepLoad,
    layer: int,
    load_EM: NDArray[np.int64],
    home: NDArray[np.int32],
    cluster: Cluster,
    rates: Rates,
    means: Means,
) -> NDArray[np.int32]:
    """Homes by swap search: over nodes where flash copies level their ranks, over ranks where there are none."""
    group = cluster.ranks_per_node
    per_bin = 1 if means.spare_slots == 0 else group
    bins = (home // per_bin).astype(np.int64)
    num_bins = cluster.num_ranks // per_bin
    time_BEM = np.broadcast_to(load_EM * (rates.step_row_us / per_bin), (num_bins, *load_EM.shape)).copy()
    if cluster.num_nodes > 1 and rates.cross_row_us > 0:
        source_MEN = load.tokens_MLER[:, layer].reshape(*load.tokens_MLER.shape[::2], cluster.num_nodes, group)
        near_NEM = source_MEN.sum(axis=3, dtype=np.int64).transpose(2, 1, 0)
        away = load_EM - near_NEM  # pairs that would come from other nodes
        time_BEM += np.repeat(away, num_bins // cluster.num_nodes, axis=0) * (rates.cross_row_us / per_bin)
    time_BEM, unit = quantized(time_BEM)
    move_us = (rates.move_us if cluster.num_nodes > 1 else rates.move_inside_us) / cluster.num_ranks
    base = np.zeros((num_bins, load_EM.shape[1]), np.int32)
    price = int(move_us / unit)
    new_bins, _ = reorder_bins(
        bins, base, time_BEM, price, means.work // load_EM.shape[1] + 1, means.seed + layer, means.max_moves
    )
    return _slots_exchanged(home, bins, new_bins)


def _slots_exchanged(
    home: NDArray[np.int32], bins: NDArray[np.int64], new_bins: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Ranks for the new bins: an expert that enters a bin takes the rank of one that leaves it."""
    moved = np.flatnonzero(bins != new_bins)
    result = home.copy()
    for b in np.unique(new_bins[moved]):
        result[moved[new_bins[moved] == b]] = home[moved[bins[moved] == b]]
    return result


@kernel
def _fill(  # type: ignore[no-untyped-def]
    tokens_MLER,
    layer,
    bench,
    num_nodes,
    group,
    slots,
    tolerance,
    min_tokens,
    tries,
    num,
    copies,
    standing_MCR,
    pool,
):
    """Balance every micro-batch of a layer; returns the number of flash copies."""
    total = 0
    one = np.empty((5, group * num_nodes * slots + 1), np.int64)
    for m in range(tokens_MLER.shape[0]):
        n = balance_micro_batch(
            tokens_MLER[m, layer], bench, num_nodes, group, slots, tolerance, min_tokens, tries,
            one, standing_MCR[m], pool[total:],
        )  # fmt: skip
        copies[:, total : total + n] = one[:, :n]
        num[m] = n
        total += n
    return total


def fill(
    load: StepLoad,
    layer: int,
    home: NDArray[np.int32],
    standing_expert: NDArray[np.integer],
    standing_rank: NDArray[np.integer],
    cluster: Cluster,
    *,
    slots: int,
    tolerance: float,
    min_tokens: int,
) -> LayerCopies:
    """Flash copies and splits of every micro-batch of one layer."""
    num_micro_batches, num_ranks = load.num_micro_batches, cluster.num_ranks
    bench = bench_for(cluster, home, slots, standing_expert, standing_rank)
    most = num_micro_batches * num_ranks * slots
    copies = np.empty((5, most), np.int64)
    num = np.zeros(num_micro_batches, np.int64)
    standing_MCR = np.zeros((num_micro_batches, standing_expert.size, num_ranks), np.int32)
    pool = np.zeros((most + standing_expert.size + 1, num_ranks), np.int32)
    n = _fill(
        load.tokens_MLER, layer, bench, cluster.num_nodes, cluster.ranks_per_node, slots, tolerance, min_tokens, TRIES,
        num, copies, standing_MCR, pool,
    )  # fmt: skip
    return LayerCopies(
        num_of_micro_batch=num,
        expert=copies[EXPERT, :n].astype(np.int32),
        rank=copies[TARGET, :n].astype(np.int32),
        origin=copies[ORIGIN, :n].astype(np.int32),
        tokens_FR=pool[:n].copy(),
        standing_tokens_CMR=np.ascontiguousarray(standing_MCR.transpose(1, 0, 2)),
    )
