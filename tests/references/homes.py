"""Reordering by trying everything."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def all_homes(num_experts, num_bins):
    """Every way to give each bin the same number of experts, as arrays [E] of bins."""
    size = num_experts // num_bins

    def place(left, b):
        if b == num_bins - 1:
            yield dict.fromkeys(left, b)
            return
        for chosen in combinations(left, size):
            rest = [e for e in left if e not in chosen]
            for more in place(rest, b + 1):
                yield {**dict.fromkeys(chosen, b), **more}

    for homes in place(list(range(num_experts)), 0):
        yield np.array([homes[e] for e in range(num_experts)])


def cost_of_homes(home, home0, base_BM, time_BEM, price):
    """Sum over micro-batches of the slowest bin, plus price per expert away from home0."""
    x = base_BM.astype(np.int64).copy()
    for e, b in enumerate(home):
        x[b] += time_BEM[b, e]
    return int(x.max(axis=0).sum()) + price * int(np.count_nonzero(np.asarray(home) != home0))


def best_homes(home0, base_BM, time_BEM, price, max_moves):
    """The smallest cost of all homes that move at most max_moves experts (-1: any number)."""
    return min(
        cost_of_homes(home, home0, base_BM, time_BEM, price)
        for home in all_homes(len(home0), base_BM.shape[0])
        if max_moves < 0 or np.count_nonzero(home != home0) <= max_moves
    )
