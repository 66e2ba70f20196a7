"""Pack: sequences into (micro-batch, rank) cells under a token budget.

Symbols: S sequences, M micro-batches, R ranks, N nodes, L layers; a cell is one rank's part of one micro-batch.

A sequence of s tokens costs a * s + s^2 (dense parts and attention; a as in verl). Ranks wait for each other in every
micro-batch, so a schedule costs sum_m max_r cost[m, r]. In whole numbers throughout:
1. Cells: longest first into the cheapest cell with room, with the smallest M that fits; then sequences are moved and
   swapped out of the costliest cell while that lowers it.
2. Micro-batches: cells by falling cost, R at a time; then the same out of each micro-batch's slowest cell.
3. Experts: `spread.py`, at no cost in attention time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import BudgetError, InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import Schedule, SequenceLoad
from equilibra.core.placement import Cluster, Placement
from equilibra.plan.spread import spread_experts

__all__ = [
    "DENSE_COST", "cell_cost", "check_budget", "fewest_micro_batches", "in_order", "joined", "pack",
    "turn_in_mini_batch",
]  # fmt: skip


def joined(
    sequences: SequenceLoad,
    mini_batch_of_sequence: NDArray[np.integer],
    schedule_of: Callable[[SequenceLoad], Schedule],
) -> Schedule:
    """Schedule each mini-batch separately and join them in order; empty micro-batches are left out.

    The sequences of an optimizer step belong to the training recipe, so packing never moves them to another.
    """
    micro_batch, rank = np.zeros((2, sequences.num_sequences), np.int32)
    width = 1
    num_of_mini_batch: list[int] = []
    for mini_batch in range(int(mini_batch_of_sequence.max()) + 1):
        chosen = np.flatnonzero(mini_batch_of_sequence == mini_batch)
        part = schedule_of(
            SequenceLoad(
                tokens_SLE=sequences.tokens_SLE[chosen], length_of_sequence=sequences.length_of_sequence[chosen]
            )
        )
        used, number = np.unique(part.micro_batch_of_sequence, return_inverse=True)
        micro_batch[chosen] = sum(num_of_mini_batch) + number
        rank[chosen] = part.rank_of_sequence
        width = part.ranks_per_sequence
        num_of_mini_batch.append(used.size)
    return Schedule(
        micro_batch_of_sequence=micro_batch,
        rank_of_sequence=rank,
        num_micro_batches=sum(num_of_mini_batch),
        ranks_per_sequence=width,
        mini_batch_of_micro_batch=np.repeat(np.arange(len(num_of_mini_batch), dtype=np.int32), num_of_mini_batch),
    )


def turn_in_mini_batch(schedule: Schedule) -> NDArray[np.int64]:
    """[M] position of every micro-batch in its mini-batch."""
    number = np.arange(schedule.num_micro_batches)
    mini = schedule.mini_batch_of_micro_batch
    return number if mini is None else number - np.searchsorted(mini, mini)


DENSE_COST = 24_576
"""cost of a token's dense parts, in units of the attention cost s^2"""
_WORK = 200_000_000


def cell_cost(schedule: Schedule, lengths: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """[M, R] cost of every cell."""
    cost = np.zeros((schedule.num_micro_batches, num_ranks), np.int64)
    weights = DENSE_COST * lengths + lengths**2
    np.add.at(cost, (schedule.micro_batch_of_sequence, schedule.rank_of_sequence), weights)
    return cost


def in_order(lengths: NDArray[np.int64], cluster: Cluster, *, tokens_per_rank: int) -> Schedule:
    """The schedule of a framework that does not balance: sequences in file order, cell after cell."""
    check_budget(lengths, tokens_per_rank)
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
    """Lower bound on M: all tokens must fit, and no two sequences above half a budget share a cell."""
    cells = max(-(-int(lengths.sum()) // tokens_per_rank), int(np.count_nonzero(2 * lengths > tokens_per_rank)), 1)
    return -(-cells // num_ranks)


def pack(
    sequences: SequenceLoad,
    cluster: Cluster,
    *,
    tokens_per_rank: int,
    home: Placement | None = None,
    ranks_per_sequence: int = 1,
    least_micro_batches: int = 1,
    token_cost: int = DENSE_COST,
) -> Schedule:
    """Few micro-batches, even cells of ranks_per_sequence ranks and, if homes are given, experts spread over
    micro-batches.
    """
    lengths = sequences.length_of_sequence.astype(np.int64)
    budget, num_cells = tokens_per_rank * ranks_per_sequence, cluster.num_ranks // ranks_per_sequence
    check_budget(lengths, budget)
    cost = token_cost * lengths + lengths**2
    order = np.argsort(-lengths, kind="stable")
    num_micro_batches = max(fewest_micro_batches(lengths, num_cells, budget), least_micro_batches)
    while True:
        cell_of_sequence = _cells(lengths, cost, order, num_micro_batches * num_cells, budget)
        if cell_of_sequence[0] >= 0:
            break
        num_micro_batches += 1
    even = cell_of_sequence.copy()
    _wait_less(lengths, cost, even, 1, num_micro_batches * num_cells, budget, 0)
    grouped = [_grouped(cells, cost, num_micro_batches, num_cells) for cells in (even, cell_of_sequence)]
    cell_of_sequence = min(grouped, key=lambda cells: _waiting(cells, cost, num_micro_batches, num_cells))
    _wait_less(lengths, cost, cell_of_sequence, num_micro_batches, num_cells, budget, 1)
    if home is not None and num_micro_batches > 1:
        spread_experts(sequences, home, cell_of_sequence, cost, num_micro_batches, num_cells, budget)
    return Schedule(
        micro_batch_of_sequence=(cell_of_sequence // num_cells).astype(np.int32),
        rank_of_sequence=(cell_of_sequence % num_cells * ranks_per_sequence).astype(np.int32),
        num_micro_batches=num_micro_batches,
        ranks_per_sequence=ranks_per_sequence,
    )


def check_budget(lengths: NDArray[np.int64], tokens_per_rank: int) -> None:
    """Raise if there are no sequences or one does not fit into a cell."""
    if lengths.ndim != 1 or lengths.size == 0:
        raise InputError(f"cannot schedule lengths of shape {lengths.shape}: a list of at least one is needed")
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, a rank takes {tokens_per_rank} per "
            f"micro-batch: allow at least {lengths.max()} tokens per rank, or cut the sequence"
        )


def _grouped(
    cell_of_sequence: NDArray[np.int64], cost: NDArray[np.int64], num_micro_batches: int, num_ranks: int
) -> NDArray[np.int64]:
    """Cells renumbered by falling cost, so that a micro-batch has cells of similar cost."""
    total = _spent(cell_of_sequence, cost, num_micro_batches * num_ranks)
    rank_of_cell = np.empty(total.size, np.int64)
    rank_of_cell[np.argsort(-total, kind="stable")] = np.arange(total.size)
    return rank_of_cell[cell_of_sequence]


def _spent(cell_of_sequence: NDArray[np.int64], cost: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    total = np.zeros(num_cells, np.int64)
    np.add.at(total, cell_of_sequence, cost)
    return total


def _waiting(
    cell_of_sequence: NDArray[np.int64], cost: NDArray[np.int64], num_micro_batches: int, num_ranks: int
) -> int:
    """sum_m max_r, the cost of a schedule."""
    total = _spent(cell_of_sequence, cost, num_micro_batches * num_ranks)
    return int(total.reshape(num_micro_batches, num_ranks).max(axis=1).sum())


@kernel
def _cells(lengths, cost, order, num_cells, budget):  # type: ignore[no-untyped-def]
    """Longest first into the cheapest cell with room, else tightest fit for all; -1 in entry 0 if neither works."""
    cell_of_sequence = np.empty(lengths.size, np.int64)
    used = np.zeros(num_cells, np.int64)
    heap = [(np.int64(0), np.int64(c)) for c in range(num_cells)]  # (spent, cell): in order, so a heap
    full = [(np.int64(0), np.int64(0)) for _ in range(0)]
    done = True
    for s in order:
        while heap and used[heap[0][1]] + lengths[s] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            done = False
            break
        spent, c = heapq.heappop(heap)
        cell_of_sequence[s] = c
        used[c] += lengths[s]
        heapq.heappush(heap, (spent + cost[s], c))
        while full:  # room for a shorter one, perhaps
            heapq.heappush(heap, full.pop())
    if not done:
        used[:] = 0
        done = True
        for s in order:
            best = -1
            for k in range(num_cells):
                if used[k] + lengths[s] <= budget and (best < 0 or used[k] > used[best]):
                    best = k
                if used[k] == 0:
                    break  # later cells are empty too
            if best < 0:
                done = False
                break
            cell_of_sequence[s] = best
            used[best] += lengths[s]
    if not done:
        cell_of_sequence[0] = -1
    return cell_of_sequence


@kernel
def _wait_less(lengths, cost, cell_of_sequence, num_micro_batches, num_ranks, budget, alone):  # type: ignore[no-untyped-def]
    """Move or swap items out of the slowest cell of every micro-batch, where no other micro-batch gets slower.

    alone: 1 if only the slowest cell counts; 0 if lowering one of several slowest cells is worth a move too.
    """
    used = np.zeros(num_micro_batches * num_ranks, np.int64)
    spent = np.zeros(num_micro_batches * num_ranks, np.int64)
    for s in range(lengths.size):
        used[cell_of_sequence[s]] += lengths[s]
        spent[cell_of_sequence[s]] += cost[s]
    slowest = np.zeros(num_micro_batches, np.int64)
    for c in range(spent.size):
        slowest[c // num_ranks] = max(slowest[c // num_ranks], spent[c])
    work = _WORK
    improved = True
    while improved and work > 0:
        improved = False
        for m in range(num_micro_batches):
            top = m * num_ranks
            for c in range(m * num_ranks, (m + 1) * num_ranks):
                if spent[c] > spent[top]:
                    top = c
            second = np.int64(0)
            for c in range(m * num_ranks, (m + 1) * num_ranks):
                if c != top:
                    second = max(second, spent[c])
            least = alone * second
            best = spent[top]
            best_out = -1
            best_in = -1
            best_cell = -1
            for out in range(lengths.size):
                if cell_of_sequence[out] != top:
                    continue
                work -= lengths.size + spent.size
                for c in range(spent.size):
                    if c == top or used[c] + lengths[out] > budget or spent[c] + cost[out] > slowest[c // num_ranks]:
                        continue
                    after = max(least, spent[top] - cost[out])
                    if c // num_ranks == m:
                        after = max(after, spent[c] + cost[out])
                    if after < best:
                        best = after
                        best_out = out
                        best_in = -1
                        best_cell = c
                for other in range(lengths.size):
                    c = cell_of_sequence[other]
                    more = cost[out] - cost[other]
                    longer = lengths[out] - lengths[other]
                    if c == top or more <= 0 or used[c] + longer > budget or spent[c] + more > slowest[c // num_ranks]:
                        continue
                    after = max(least, spent[top] - more)
                    if c // num_ranks == m:
                        after = max(after, spent[c] + more)
                    if after < best:
                        best = after
                        best_out = out
                        best_in = other
                        best_cell = c
            if best_out < 0:
                continue
            improved = True
            for item, source, target in ((best_out, top, best_cell), (best_in, best_cell, top)):
                if item >= 0:
                    used[source] -= lengths[item]
                    spent[source] -= cost[item]
                    used[target] += lengths[item]
                    spent[target] += cost[item]
                    cell_of_sequence[item] = target
            slowest[m] = max(best, second)
