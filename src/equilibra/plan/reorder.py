"""Reorder: the home of every expert of one layer for the coming batch.

Symbols: B bins (nodes, or the ranks of a cluster of one node), E experts, M micro-batches; time_BEM the time that
expert e adds to bin b in micro-batch m if its home is there (compute, and the traffic from other bins).

Problem. Choose homes, equally many per bin as before, that minimise sum_m max_b time[b, m] plus `price` for every
expert that leaves the bin it was in.

Method. Swap two experts of two bins while the cost falls: for each pair of bins all swaps are evaluated at once with
the times of the other bins held, which is one pass over [experts, experts, M]. From the local optimum, kick a few
random swaps and descend again, and keep what is better (iterated local search).

Promises: never costs more than staying; whole-number arithmetic, so that every machine finds the same homes whatever
its vector width; the same seed gives the same homes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel

__all__ = ["quantized", "reorder_bins"]


def quantized(time_BEM: NDArray[np.float64]) -> tuple[NDArray[np.int32], float]:
    """Times as whole numbers that sum over experts and micro-batches without overflow, and the time of one unit."""
    num_micro_batches = time_BEM.shape[2]
    largest = float(time_BEM.max(axis=0).sum(axis=0).max())
    unit = largest * num_micro_batches / 2**29 if largest > 0 else 1.0
    return np.rint(time_BEM / unit).astype(np.int32), unit


@kernel
def _swap(members, position, x_BM, time_BEM, p, i, q, j):  # type: ignore[no-untyped-def]
    """Exchange member i of bin p and member j of bin q."""
    a = members[p, i]
    b = members[q, j]
    for m in range(x_BM.shape[1]):
        x_BM[p, m] += time_BEM[p, b, m] - time_BEM[p, a, m]
        x_BM[q, m] += time_BEM[q, a, m] - time_BEM[q, b, m]
    members[p, i] = b
    members[q, j] = a
    position[a] = q
    position[b] = p


@kernel
def _descend(members, position, home0, x_BM, time_BEM, price, budget, max_moves):  # type: ignore[no-untyped-def]
    """Apply the best swap of each pair of bins until none helps; returns what is left of the budget."""
    num_bins, num_micro_batches = x_BM.shape
    size = members.shape[1]
    without_p = np.empty((size, num_micro_batches), np.int32)
    without_q = np.empty((size, num_micro_batches), np.int32)
    others = np.empty(num_micro_batches, np.int32)
    num_pairs = num_bins * (num_bins - 1) // 2
    moves = np.int64(0)
    for e in range(position.size):
        moves += position[e] != home0[e]
    quiet = 0  # pairs in a row without a swap that helps
    p = np.int64(0)
    q = np.int64(1)
    while quiet < num_pairs and budget > 0:
        for m in range(num_micro_batches):
            others[m] = 0
        for b in range(num_bins):
            if b != p and b != q:
                for m in range(num_micro_batches):
                    others[m] = max(others[m], x_BM[b, m])
        now = np.int64(0)
        for m in range(num_micro_batches):
            now += max(others[m], x_BM[p, m], x_BM[q, m])
        for i in range(size):
            a = members[p, i]
            b = members[q, i]
            for m in range(num_micro_batches):
                without_p[i, m] = x_BM[p, m] - time_BEM[p, a, m]
                without_q[i, m] = x_BM[q, m] - time_BEM[q, b, m]
        best = np.int64(0)
        best_i = np.int64(-1)
        best_j = np.int64(-1)
        best_away = np.int64(0)
        for i in range(size):
            a = members[p, i]
            for j in range(size):
                b = members[q, j]
                total = np.int32(0)
                for m in range(num_micro_batches):
                    in_p = without_p[i, m] + time_BEM[p, b, m]
                    in_q = without_q[j, m] + time_BEM[q, a, m]
                    total += max(others[m], in_p, in_q)
                away = np.int64(home0[a] != q) - np.int64(home0[a] != p)
                away += np.int64(home0[b] != p) - np.int64(home0[b] != q)
                gain = now - np.int64(total) - price * away
                if max_moves >= 0 and away > 0 and moves + away > max_moves:
                    continue
                if gain > best:
                    best = gain
                    best_i = np.int64(i)
                    best_j = np.int64(j)
                    best_away = away
        budget -= size * size
        if best_i >= 0:
            moves += best_away
            _swap(members, position, x_BM, time_BEM, p, best_i, q, best_j)
            quiet = 0
        else:
            quiet += 1
            q += 1
            if q == num_bins:
                p += 1
                q = p + 1
                if q >= num_bins:
                    p = np.int64(0)
                    q = np.int64(1)
    return budget


@kernel
def _cost(x_BM, position, home0, price):  # type: ignore[no-untyped-def]
    num_bins, num_micro_batches = x_BM.shape
    cost = np.int64(0)
    for m in range(num_micro_batches):
        highest = x_BM[0, m]
        for b in range(1, num_bins):
            highest = max(highest, x_BM[b, m])
        cost += highest
    for e in range(position.size):
        if position[e] != home0[e]:
            cost += price
    return cost


def reorder_bins(
    home0: NDArray[np.int64], base_BM: NDArray[np.int32], time_BEM: NDArray[np.int32], price: int, budget: int,
    seed: int, max_moves: int,
) -> tuple[NDArray[np.int64], int]:  # fmt: skip
    """Homes [E] (bins) and their cost; home0 must have equally many experts in every bin.

    base_BM: time of each bin that does not depend on homes. price: of an expert away from home0, in the same units.
    budget: swaps to evaluate. max_moves: most experts that may leave (a migration budget), -1 for any number.
    """
    num_bins = len(base_BM)
    size = home0.size // num_bins
    members = np.argsort(home0, kind="stable").reshape(num_bins, size)
    x_BM = base_BM.copy()
    np.add.at(x_BM, home0, time_BEM[home0, np.arange(home0.size)])
    position = home0.copy()
    best, best_cost = position.copy(), int(_cost(x_BM, position, home0, price))
    if num_bins == 1:
        return best, best_cost
    below = _random_numbers(seed)
    state: list[NDArray[np.integer]] = [members, x_BM, position]
    kept, kept_cost = [array.copy() for array in state], best_cost
    first = True
    while budget > 0:
        for _ in range(0 if first else 2 + below(3)):
            p = below(num_bins)
            q = (p + 1 + below(num_bins - 1)) % num_bins
            _swap(members, position, x_BM, time_BEM, p, below(size), q, below(size))
        first = False
        budget = _descend(members, position, home0, x_BM, time_BEM, price, budget, max_moves)
        cost = int(_cost(x_BM, position, home0, price))
        moves = np.count_nonzero(position != home0)
        found = (max_moves < 0 or moves <= max_moves) and cost <= kept_cost
        for now, before in zip(state, kept, strict=True):
            if found:
                before[:] = now
            else:
                now[:] = before
        if found:
            kept_cost = cost
            if cost < best_cost:
                best, best_cost = position.copy(), cost
    return best, best_cost


def _random_numbers(seed: int) -> Callable[[int], int]:
    """below(n): the next whole number below n of a xorshift generator."""
    state = (2 * seed + 0x9E3779B97F4A7C15) % 2**64

    def below(n: int) -> int:
        nonlocal state
        state ^= (state << 13) % 2**64
        state ^= state >> 7
        state ^= (state << 17) % 2**64
        return (state >> 33) % n

    return below
