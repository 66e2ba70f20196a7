"""Reorder: the home of every expert of one layer for the coming batch.

Symbols: B bins (nodes, or the ranks of a single node), E experts, M micro-batches; time_BEM what expert e adds to bin b
in micro-batch m if its home is there.

Choose homes, equally many per bin as before, that minimise sum_m max_b time[b, m] plus `price` for every expert that
leaves its bin. Iterated local search: swap two experts while the cost falls, evaluating all swaps of a pair of bins at
once; then kick with a few random swaps, descend again, keep the better.

Never costs more than staying. Whole numbers and a fixed seed give the same homes on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel


def quantized(time_BEM: NDArray[np.float64]) -> tuple[NDArray[np.int32], float]:
    """Times as whole numbers that sum over experts and micro-batches without overflow, and the time of one unit."""
    num_micro_batches = time_BEM.shape[2]
    largest = float(time_BEM.max(axis=0).sum(axis=0).max())
    unit = largest * num_micro_batches / 2**29 if largest > 0 else 1.0
    return np.rint(time_BEM / unit).astype(np.int32), unit


@kernel
def _swap(members, position, x_BM, time_BEM, p, i, q, j):  # type: ignore[no-untyped-def]
    """Exchange member i of bin p and member j of bin q."""
    a, b = members[p, i], members[q, j]
    for m in range(x_BM.shape[1]):
        x_BM[p, m] += time_BEM[p, b, m] - time_BEM[p, a, m]
        x_BM[q, m] += time_BEM[q, a, m] - time_BEM[q, b, m]
    members[p, i], members[q, j] = b, a
    position[a], position[b] = q, p


@kernel
def _descend(members, position, home0, x_BM, time_BEM, price, budget, max_moves):  # type: ignore[no-untyped-def]
    """Apply the best swap of each pair of bins until none helps; returns the budget that is left."""
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
    p, q = np.int64(0), np.int64(1)
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
            a, b = members[p, i], members[q, i]
            for m in range(num_micro_batches):
                without_p[i, m] = x_BM[p, m] - time_BEM[p, a, m]
                without_q[i, m] = x_BM[q, m] - time_BEM[q, b, m]
        best, best_i, best_j, best_away = np.int64(0), np.int64(-1), np.int64(-1), np.int64(0)
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
                    best, best_i, best_j, best_away = gain, np.int64(i), np.int64(j), away
        budget -= size * size
        if best_i >= 0:
            moves += best_away
            _swap(members, position, x_BM, time_BEM, p, best_i, q, best_j)
            quiet = 0
        else:
            quiet += 1
            q += 1
            if q == num_bins:
                p, q = p + 1, p + 2
                if q >= num_bins:
                    p, q = np.int64(0), np.int64(1)
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


@kernel
def reorder_bins(home0, base_BM, time_BEM, price, budget, seed, max_moves):  # type: ignore[no-untyped-def]
    """Homes [E] (bins) and their cost; home0 must have equally many experts in every bin.

    base_BM: time of each bin that does not depend on homes. price: of an expert away from home0, in the same units.
    budget: swaps to evaluate. max_moves: most experts that may leave (a migration budget), -1 for any number.
    """
    num_bins = base_BM.shape[0]
    size = home0.size // num_bins
    members = np.empty((num_bins, size), np.int64)
    filled = np.zeros(num_bins, np.int64)
    position = np.empty(home0.size, np.int64)
    x_BM = np.empty(base_BM.shape, base_BM.dtype)
    for b in range(num_bins):
        for m in range(x_BM.shape[1]):
            x_BM[b, m] = base_BM[b, m]
    for e in range(home0.size):
        b = home0[e]
        position[e] = b
        members[b, filled[b]] = e
        filled[b] += 1
        for m in range(x_BM.shape[1]):
            x_BM[b, m] += time_BEM[b, e, m]
    best_cost = _cost(x_BM, position, home0, price)
    best = np.empty(home0.size, np.int64)
    kept_members, kept_x, kept_position = np.empty_like(members), np.empty_like(x_BM), np.empty_like(position)
    _copy(members, x_BM, position, kept_members, kept_x, kept_position)
    _copy(members, x_BM, position, kept_members, kept_x, best)
    kept_cost = best_cost
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed) * np.uint64(2) + np.uint64(0x9E3779B97F4A7C15)
    first = True
    while budget > 0 and num_bins > 1:
        for _ in range(0 if first else 2 + _random_below(state, 3)):
            p = _random_below(state, num_bins)
            q = (p + 1 + _random_below(state, num_bins - 1)) % num_bins
            i = _random_below(state, size)
            _swap(members, position, x_BM, time_BEM, p, i, q, _random_below(state, size))
        first = False
        budget = _descend(members, position, home0, x_BM, time_BEM, price, budget, max_moves)
        cost = _cost(x_BM, position, home0, price)
        moves = 0
        for e in range(home0.size):
            moves += position[e] != home0[e]
        if (max_moves < 0 or moves <= max_moves) and cost <= kept_cost:
            kept_cost = cost
            _copy(members, x_BM, position, kept_members, kept_x, kept_position)
            if cost < best_cost:
                best_cost = cost
                _copy(members, x_BM, position, kept_members, kept_x, best)
        else:
            _copy(kept_members, kept_x, kept_position, members, x_BM, position)
    return best, best_cost


@kernel
def _copy(members, x_BM, position, to_members, to_x, to_position):  # type: ignore[no-untyped-def]
    """Copy a state of the search; loops compile in a fraction of the time that array expressions take."""
    for b in range(members.shape[0]):
        for i in range(members.shape[1]):
            to_members[b, i] = members[b, i]
        for m in range(x_BM.shape[1]):
            to_x[b, m] = x_BM[b, m]
    for e in range(position.size):
        to_position[e] = position[e]


@inlined
def _random_below(state, n):  # type: ignore[no-untyped-def]
    """The next whole number below n of a xorshift generator."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64((x >> np.uint64(33)) % np.uint64(n))
