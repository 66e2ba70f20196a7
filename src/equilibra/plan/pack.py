"""Pack: sequences into (micro-batch, rank) cells under a token budget.

Symbols: S sequences, M micro-batches, R ranks, N nodes, L layers, D folded sums; a cell is one rank's part of one
micro-batch; a bin is a node, or a rank where there is one node.

A sequence of s tokens costs a * s + s^2 (dense parts and attention; a as in verl). Ranks wait for each other in every
micro-batch, so a schedule costs sum_m max_r cost[m, r]. In whole numbers throughout:
1. Cells: longest first into the cheapest cell with room, with the smallest M that fits; then sequences are moved and
   swapped out of the costliest cell while that lowers its cost.
2. Micro-batches: cells by falling cost, R at a time; then the same out of each micro-batch's slowest cell.
3. Spread: sequences of similar length are swapped between micro-batches where that lowers the skew of their experts,
   fits the budgets, and slows no micro-batch down. Skew is the sum of squares, over micro-batches, layers and bins, of
   a bin's load around its mean. Layers and bins are folded into D sums with random signs, which keep squares on
   average, so a swap costs D operations for any model.
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

DENSE_COST = 24_576
"""cost of a token's dense parts, in units of the attention cost s^2"""
_WORK = 200_000_000  # comparisons after which cells are not improved any more
_SWEEPS = 6  # of swaps that spread experts
_WINDOW = 24  # neighbours by length that a sequence may be swapped with
_FOLDED = 64


def joined(
    sequences: SequenceLoad,
    mini_batch_of_sequence: NDArray[np.integer],
    schedule_of: Callable[[SequenceLoad], Schedule],
) -> Schedule:
    """Schedule each mini-batch separately and join them in order; empty micro-batches are left out.

    Which sequences share an optimizer step is part of the training recipe, so packing never moves them to another.
    """
    micro_batch, rank = np.zeros((2, sequences.num_sequences), np.int32)
    num_of_mini_batch: list[int] = []
    for mini_batch in range(int(mini_batch_of_sequence.max()) + 1):
        chosen = np.flatnonzero(mini_batch_of_sequence == mini_batch)
        tokens_SLE, lengths = sequences.tokens_SLE[chosen], sequences.length_of_sequence[chosen]
        part = schedule_of(SequenceLoad(tokens_SLE=tokens_SLE, length_of_sequence=lengths))
        used, number = np.unique(part.micro_batch_of_sequence, return_inverse=True)
        micro_batch[chosen] = sum(num_of_mini_batch) + number
        rank[chosen] = part.rank_of_sequence
        num_of_mini_batch.append(used.size)
    return Schedule(
        micro_batch_of_sequence=micro_batch,
        rank_of_sequence=rank,
        num_micro_batches=sum(num_of_mini_batch),
        ranks_per_sequence=part.ranks_per_sequence,
        mini_batch_of_micro_batch=np.repeat(np.arange(len(num_of_mini_batch), dtype=np.int32), num_of_mini_batch),
    )


def turn_in_mini_batch(schedule: Schedule) -> NDArray[np.int64]:
    """[M] position of every micro-batch in its mini-batch."""
    number = np.arange(schedule.num_micro_batches)
    mini = schedule.mini_batch_of_micro_batch
    return number if mini is None else number - np.searchsorted(mini, mini)


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
    """Few micro-batches of even cells, each of ranks_per_sequence ranks; with homes, experts are spread over them."""
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
    grouped = []
    for cells in (even, cell_of_sequence):  # a micro-batch gets cells of similar cost
        by_cost = np.argsort(-_filled(lengths, cost, cells, num_micro_batches, num_cells)[1], kind="stable")
        grouped.append(np.argsort(by_cost)[cells])
    cell_of_sequence = min(
        grouped, key=lambda cells: int(_filled(lengths, cost, cells, num_micro_batches, num_cells)[2].sum())
    )
    _wait_less(lengths, cost, cell_of_sequence, num_micro_batches, num_cells, budget, 1)
    if home is not None and num_micro_batches > 1:
        skew_SD, by_length = _folded_skew(sequences, home), np.argsort(lengths, kind="stable")
        _swap_alike(skew_SD, lengths, cost, by_length, cell_of_sequence, num_micro_batches, num_cells, budget)
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


@kernel
def _filled(lengths, cost, cell_of_sequence, num_micro_batches, num_ranks):  # type: ignore[no-untyped-def]
    """Tokens and cost of every cell, and the cost of the slowest cell of every micro-batch."""
    used, spent = np.zeros((2, num_micro_batches * num_ranks), np.int64)
    for s in range(lengths.size):
        used[cell_of_sequence[s]] += lengths[s]
        spent[cell_of_sequence[s]] += cost[s]
    slowest = np.zeros(num_micro_batches, np.int64)
    for c in range(spent.size):
        slowest[c // num_ranks] = max(slowest[c // num_ranks], spent[c])
    return used, spent, slowest


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
    used, spent, slowest = _filled(lengths, cost, cell_of_sequence, num_micro_batches, num_ranks)
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
            best, best_out, best_in, best_cell = spent[top], -1, -1, -1
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
                        best, best_out, best_in, best_cell = after, out, -1, c
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
                        best, best_out, best_in, best_cell = after, out, other, c
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


# --- spread: no micro-batch with the same hot experts throughout ---


def _folded_skew(sequences: SequenceLoad, home: Placement) -> NDArray[np.float64]:
    """[S, D] how far each sequence pushes every (layer, bin) above its share, folded; products are exact in float64."""
    cluster = home.cluster
    per_bin = cluster.ranks_per_node if cluster.num_nodes > 1 else 1
    num_bins = cluster.num_ranks // per_bin
    shape = (sequences.num_layers, num_bins, _FOLDED)
    signs_LBD: NDArray[np.float64]
    if sequences.num_layers * num_bins <= _FOLDED:
        signs_LBD = np.eye(sequences.num_layers * num_bins, _FOLDED).reshape(shape)
    else:
        signs_LBD = np.random.default_rng(0).choice([-1.0, 1.0], shape)
    folded = np.zeros((sequences.num_sequences, _FOLDED))
    for layer in range(sequences.num_layers):
        in_bin_EB = (home.home_of_expert[layer] // per_bin)[:, None] == np.arange(num_bins)
        load_SB = sequences.tokens_SLE[:, layer].astype(np.float64) @ in_bin_EB
        folded += (num_bins * load_SB - load_SB.sum(axis=1, keepdims=True)) @ signs_LBD[layer]
    return np.rint(folded * (2.0**12 / max(float(np.abs(folded).max()), 1.0)))


@kernel
def _swap_alike(skew_SD, lengths, cost, order, cell_of_sequence, num_micro_batches, num_ranks, budget):  # type: ignore[no-untyped-def]
    num_sequences, width = skew_SD.shape
    used, spent, slowest = _filled(lengths, cost, cell_of_sequence, num_micro_batches, num_ranks)
    skew_MD = np.zeros((num_micro_batches, width))
    for s in range(num_sequences):
        for d in range(width):
            skew_MD[cell_of_sequence[s] // num_ranks, d] += skew_SD[s, d]
    for _ in range(_SWEEPS):
        swaps = 0
        for at in range(num_sequences):
            i = order[at]
            ci = cell_of_sequence[i]
            a = ci // num_ranks
            best, best_j = 0.0, -1
            for k in range(max(at - _WINDOW, 0), min(at + _WINDOW + 1, num_sequences)):
                j = order[k]
                cj = cell_of_sequence[j]
                b = cj // num_ranks
                longer = lengths[j] - lengths[i]
                more = cost[j] - cost[i]
                if a == b or used[ci] + longer > budget or used[cj] - longer > budget:
                    continue
                if spent[ci] + more > slowest[a] or spent[cj] - more > slowest[b]:
                    continue
                change = 0.0  # of the sum of squares, halved
                for d in range(width):
                    moved = skew_SD[j, d] - skew_SD[i, d]
                    change += moved * (skew_MD[a, d] - skew_MD[b, d] + moved)
                if change < best:
                    best, best_j = change, j
            if best_j >= 0:
                j = best_j
                cj = cell_of_sequence[j]
                b = cj // num_ranks
                used[ci] += lengths[j] - lengths[i]
                used[cj] -= lengths[j] - lengths[i]
                spent[ci] += cost[j] - cost[i]
                spent[cj] -= cost[j] - cost[i]
                cell_of_sequence[i], cell_of_sequence[j] = cj, ci
                for d in range(width):
                    skew_MD[a, d] += skew_SD[j, d] - skew_SD[i, d]
                    skew_MD[b, d] -= skew_SD[j, d] - skew_SD[i, d]
                swaps += 1
        if swaps == 0:
            break
