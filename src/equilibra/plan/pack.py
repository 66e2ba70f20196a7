"""Pack: sequences into (micro-batch, rank) cells under a token budget.

Symbols: S sequences, M micro-batches, R ranks, N nodes, L layers; a cell is one rank's part of one micro-batch.

Cost. A sequence of s tokens costs a * s + s^2 (dense parts and attention; a as for a 7B-class model, the constant that
verl uses). Ranks wait for each other in every micro-batch, so the cost of a schedule is sum_m max_r cost[m, r].

Method, in whole numbers throughout:
1. Cells: longest first into the cheapest cell with room; then items are moved and swapped out of the costliest cell
   while that lowers it. M is the smallest number for which all sequences find a cell.
2. Micro-batches: cells in falling order of cost, R at a time, so that cells that wait for each other cost the same.
3. Experts: sequences of like length are swapped between micro-batches where that lowers the skew, the sum of squares
   of the load of every (layer, node) around its mean (every rank where there is one node), and raises no micro-batch's
   slowest cell. One swap is weighed in constant time from the inner products of the sequences' loads.

Promises: no cell above the budget; never more micro-batches than longest-first needs; step 3 costs no attention time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.errors import BudgetError, InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import Placement
from equilibra.core.schedule import Schedule

__all__ = ["DENSE_COST", "cell_cost", "fewest_micro_batches", "in_order", "pack"]

DENSE_COST = 24_576
"""cost of a token's dense parts, in units of the attention cost s^2"""
_SWEEPS = 6
_WINDOW = 24


def cell_cost(schedule: Schedule, lengths: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """[M, R] cost of every cell."""
    cost = np.zeros((schedule.num_micro_batches, num_ranks), np.int64)
    weights = DENSE_COST * lengths + lengths**2
    np.add.at(cost, (schedule.micro_batch_of_sequence, schedule.rank_of_sequence), weights)
    return cost


def in_order(lengths: NDArray[np.int64], cluster: Cluster, *, tokens_per_rank: int) -> Schedule:
    """The schedule of a framework that does not look: sequences in file order, cell after cell."""
    _check_budget(lengths, tokens_per_rank)
    cell_of_sequence = np.zeros(lengths.size, np.int64)
    cell = used = 0
    for s, length in enumerate(lengths.tolist()):
        if used and used + length > tokens_per_rank:
            cell, used = cell + 1, 0
        cell_of_sequence[s] = cell
        used += length
    return Schedule(
        micro_batch_of_sequence=(cell_of_sequence // cluster.num_ranks).astype(np.int32),
        rank_of_sequence=(cell_of_sequence % cluster.num_ranks).astype(np.int32),
        num_micro_batches=cell // cluster.num_ranks + 1,
    )


def fewest_micro_batches(lengths: NDArray[np.int64], num_ranks: int, tokens_per_rank: int) -> int:
    """A lower bound on M: all tokens must fit, and no two sequences above half a budget share a cell."""
    cells = max(-(-int(lengths.sum()) // tokens_per_rank), int(np.count_nonzero(2 * lengths > tokens_per_rank)), 1)
    return -(-cells // num_ranks)


def pack(sequences: SequenceLoad, cluster: Cluster, *, tokens_per_rank: int, home: Placement | None = None) -> Schedule:
    """A schedule with the fewest micro-batches, even cells, and experts spread; homes are needed for the last part."""
    lengths = sequences.length_of_sequence.astype(np.int64)
    _check_budget(lengths, tokens_per_rank)
    num_ranks = cluster.num_ranks
    cost = DENSE_COST * lengths + lengths**2
    order = np.argsort(-lengths, kind="stable")
    num_micro_batches = fewest_micro_batches(lengths, num_ranks, tokens_per_rank)
    while True:
        cell_of_sequence = _cells(lengths, cost, order, num_micro_batches * num_ranks, tokens_per_rank)
        if cell_of_sequence[0] >= 0:
            break
        num_micro_batches += 1
    _even(lengths, cost, cell_of_sequence, num_micro_batches * num_ranks, tokens_per_rank)
    cell_of_sequence = _grouped(cell_of_sequence, cost, num_micro_batches, num_ranks)
    if home is not None and num_micro_batches > 1:
        _spread(sequences, home, cell_of_sequence, cost, num_micro_batches, tokens_per_rank)
    return Schedule(
        micro_batch_of_sequence=(cell_of_sequence // num_ranks).astype(np.int32),
        rank_of_sequence=(cell_of_sequence % num_ranks).astype(np.int32),
        num_micro_batches=num_micro_batches,
    )


def _check_budget(lengths: NDArray[np.int64], tokens_per_rank: int) -> None:
    if lengths.ndim != 1 or lengths.size == 0:
        raise InputError(f"cannot schedule sequences of lengths {lengths.shape}: a list of at least one is needed")
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, a rank takes {tokens_per_rank} per "
            f"micro-batch: allow at least {lengths.max()} tokens per rank, or cut the sequence"
        )


def _grouped(
    cell_of_sequence: NDArray[np.int64], cost: NDArray[np.int64], num_micro_batches: int, num_ranks: int
) -> NDArray[np.int64]:
    """Cells renumbered in falling order of cost, so that a micro-batch has cells of like cost."""
    total = np.zeros(num_micro_batches * num_ranks, np.int64)
    np.add.at(total, cell_of_sequence, cost)
    rank_of_cell = np.empty(total.size, np.int64)
    rank_of_cell[np.argsort(-total, kind="stable")] = np.arange(total.size)
    return rank_of_cell[cell_of_sequence]


@kernel
def _cells(lengths, cost, order, num_cells, budget):  # type: ignore[no-untyped-def]
    """Longest first into the cheapest cell with room, else tightest fit for all; -1 in entry 0 if neither works."""
    cell_of_sequence = np.empty(lengths.size, np.int64)
    for tight in range(2):
        used = np.zeros(num_cells, np.int64)
        spent = np.zeros(num_cells, np.int64)
        done = True
        for s in order:
            best = -1
            for c in range(num_cells):
                if used[c] + lengths[s] <= budget and (
                    best < 0 or (used[c] > used[best] if tight else spent[c] < spent[best])
                ):
                    best = c
                    if used[c] == 0:
                        break  # later cells are empty too
            if best < 0:
                done = False
                break
            cell_of_sequence[s] = best
            used[best] += lengths[s]
            spent[best] += cost[s]
        if done:
            return cell_of_sequence
    cell_of_sequence[0] = -1
    return cell_of_sequence


@kernel
def _even(lengths, cost, cell_of_sequence, num_cells, budget):  # type: ignore[no-untyped-def]
    """Move or swap items out of the costliest cell while that lowers it."""
    used = np.zeros(num_cells, np.int64)
    spent = np.zeros(num_cells, np.int64)
    for s in range(lengths.size):
        used[cell_of_sequence[s]] += lengths[s]
        spent[cell_of_sequence[s]] += cost[s]
    for _ in range(4 * num_cells):
        top = np.argmax(spent)
        # The best partner leaves the larger of the two cells lowest.
        best = spent[top]
        best_out = -1
        best_in = -1
        best_cell = -1
        for out in range(lengths.size):
            if cell_of_sequence[out] != top:
                continue
            for c in range(num_cells):
                if c != top and used[c] + lengths[out] <= budget:
                    worst = max(spent[top] - cost[out], spent[c] + cost[out])
                    if worst < best:
                        best = worst
                        best_out = out
                        best_in = -1
                        best_cell = c
            for other in range(lengths.size):
                c = cell_of_sequence[other]
                if c == top or cost[other] >= cost[out]:
                    continue
                longer = lengths[out] - lengths[other]
                if used[c] + longer > budget:
                    continue
                worst = max(spent[top] - cost[out] + cost[other], spent[c] + cost[out] - cost[other])
                if worst < best:
                    best = worst
                    best_out = out
                    best_in = other
                    best_cell = c
        if best_out < 0:
            break
        used[top] -= lengths[best_out]
        spent[top] -= cost[best_out]
        used[best_cell] += lengths[best_out]
        spent[best_cell] += cost[best_out]
        cell_of_sequence[best_out] = best_cell
        if best_in >= 0:
            used[best_cell] -= lengths[best_in]
            spent[best_cell] -= cost[best_in]
            used[top] += lengths[best_in]
            spent[top] += cost[best_in]
            cell_of_sequence[best_in] = top


def _spread(
    sequences: SequenceLoad,
    home: Placement,
    cell_of_sequence: NDArray[np.int64],
    cost: NDArray[np.int64],
    num_micro_batches: int,
    budget: int,
) -> None:
    """Swap sequences between micro-batches where that lowers the skew of the experts' loads."""
    cluster = home.cluster
    per_bin = cluster.ranks_per_node if cluster.num_nodes > 1 else 1
    num_bins = cluster.num_ranks // per_bin
    load_SLB = np.zeros((sequences.num_sequences, sequences.num_layers, num_bins))
    for layer in range(sequences.num_layers):
        in_bin_EB = (home.home_of_expert[layer] // per_bin)[:, None] == np.arange(num_bins)
        load_SLB[:, layer] = sequences.tokens_SLE[:, layer].astype(np.float64) @ in_bin_EB
    # Whole numbers below 2^53 make the products exact, and so the same on every machine.
    skew = num_bins * load_SLB - load_SLB.sum(axis=2, keepdims=True)
    scale = max(float(np.abs(skew).max()) / 2**15, 1.0)
    skew = np.rint(skew / scale).reshape(sequences.num_sequences, -1)
    inner_SS = skew @ skew.T
    order = np.argsort(sequences.length_of_sequence, kind="stable")
    _swap_alike(
        inner_SS, sequences.length_of_sequence.astype(np.int64), cost, order, cell_of_sequence,
        num_micro_batches, cluster.num_ranks, budget,
    )  # fmt: skip


@kernel
def _swap_alike(inner_SS, lengths, cost, order, cell_of_sequence, num_micro_batches, num_ranks, budget):  # type: ignore[no-untyped-def]
    num_sequences = lengths.size
    used = np.zeros(num_micro_batches * num_ranks, np.int64)
    spent = np.zeros(num_micro_batches * num_ranks, np.int64)
    slowest = np.zeros(num_micro_batches, np.int64)
    toward_MS = np.zeros((num_micro_batches, num_sequences))  # inner product of micro-batch and sequence
    for s in range(num_sequences):
        c = cell_of_sequence[s]
        used[c] += lengths[s]
        spent[c] += cost[s]
        toward_MS[c // num_ranks] += inner_SS[s]
    for c in range(spent.size):
        slowest[c // num_ranks] = max(slowest[c // num_ranks], spent[c])
    for _ in range(_SWEEPS):
        swaps = 0
        for at in range(num_sequences):
            i = order[at]
            a = cell_of_sequence[i] // num_ranks
            best = -1e-9
            best_j = -1
            for k in range(max(at - _WINDOW, 0), min(at + _WINDOW + 1, num_sequences)):
                j = order[k]
                b = cell_of_sequence[j] // num_ranks
                if a == b:
                    continue
                longer = lengths[j] - lengths[i]
                more = cost[j] - cost[i]
                ci = cell_of_sequence[i]
                cj = cell_of_sequence[j]
                if used[ci] + longer > budget or used[cj] - longer > budget:
                    continue
                if spent[ci] + more > slowest[a] or spent[cj] - more > slowest[b]:
                    continue
                change = toward_MS[a, j] - toward_MS[a, i] - toward_MS[b, j] + toward_MS[b, i]
                change += inner_SS[i, i] - 2 * inner_SS[i, j] + inner_SS[j, j]
                if change < best:
                    best = change
                    best_j = j
            if best_j >= 0:
                j = best_j
                ci = cell_of_sequence[i]
                cj = cell_of_sequence[j]
                b = cj // num_ranks
                used[ci] += lengths[j] - lengths[i]
                used[cj] -= lengths[j] - lengths[i]
                spent[ci] += cost[j] - cost[i]
                spent[cj] -= cost[j] - cost[i]
                cell_of_sequence[i] = cj
                cell_of_sequence[j] = ci
                for s in range(num_sequences):
                    moved = inner_SS[j, s] - inner_SS[i, s]
                    toward_MS[a, s] += moved
                    toward_MS[b, s] -= moved
                swaps += 1
        if swaps == 0:
            break
