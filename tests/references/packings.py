"""Longest-first, Karmarkar-Karp and first-fit decreasing: what pack is compared with.

A packing is a list of cells, a cell a list of sequence numbers. The first two know no token budget.
"""

from __future__ import annotations

import heapq
from itertools import count


def longest_first(costs, num_cells):
    """The costliest item first, always into the cheapest cell."""
    cells = [[] for _ in range(num_cells)]
    heap = [(0, c) for c in range(num_cells)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        spent, c = heapq.heappop(heap)
        cells[c].append(item)
        heapq.heappush(heap, (spent + costs[item], c))
    return cells


def karmarkar_karp(costs, num_cells):
    """Largest differencing: join the two partial solutions whose spread is largest, fullest part to emptiest."""
    number = count()
    heap = []
    for item, cost in enumerate(costs):
        parts = sorted([(cost, [item])] + [(0, []) for _ in range(num_cells - 1)], key=lambda p: -p[0])
        heapq.heappush(heap, (-(parts[0][0] - parts[-1][0]), next(number), parts))
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        parts = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        parts.sort(key=lambda p: -p[0])
        heapq.heappush(heap, (-(parts[0][0] - parts[-1][0]), next(number), parts))
    return [items for _, items in heap[0][2]]


def first_fit_decreasing(lengths, budget):
    """Cells, as few as this rule finds, with no cell above the budget."""
    cells, used = [], []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for c in range(len(cells)):
            if used[c] + lengths[item] <= budget:
                break
        else:
            cells.append([])
            used.append(0)
            c = len(cells) - 1
        cells[c].append(item)
        used[c] += lengths[item]
    return cells


def fewest_cells(lengths, budget):
    """The fewest cells, by trying everything (a dozen sequences at most)."""
    lengths = sorted(lengths, reverse=True)
    best = [len(lengths)]

    def place(at, used):
        if len(used) >= best[0]:
            return
        if at == len(lengths):
            best[0] = len(used)
            return
        tried = set()
        for c in range(len(used)):
            if used[c] + lengths[at] <= budget and used[c] not in tried:
                tried.add(used[c])
                used[c] += lengths[at]
                place(at + 1, used)
                used[c] -= lengths[at]
        used.append(lengths[at])
        place(at + 1, used)
        used.pop()

    place(0, [])
    return best[0]


def waiting_cost(cells, costs, num_ranks):
    """Sum over micro-batches of the costliest cell, cells of like cost sharing a micro-batch; and the largest cell."""
    spent = sorted((sum(costs[i] for i in cell) for cell in cells), reverse=True)
    return sum(spent[::num_ranks]), spent[0]
