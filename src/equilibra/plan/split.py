"""Split: how many tokens of each (source rank, expert) each instance of the expert serves.

Symbols: R source ranks, Q instances of one expert with their quotas; quotas and tokens have the same sum.

A source serves its own rank's instance first, then its node's, then the others, in the order of ranks. No split with
these quotas keeps more tokens on their rank or on their node (proof in docs/planner.md).
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import inlined

__all__ = ["split_expert"]


@inlined
def _pour(left, quota, q, start, end, to, out):  # type: ignore[no-untyped-def]
    """Fill quota q from the sources start..end - 1; returns where the next instance goes on."""
    need = quota[q]
    r = start
    while need > 0 and r < end:
        here = min(left[r], need)
        left[r] -= here
        if to >= 0:
            out[to, r] += here
        need -= here
        r += 1
    quota[q] = need
    return max(r - 1, start)


@inlined
def split_expert(left, rank, node, quota, home, group, row, out):  # type: ignore[no-untyped-def]
    """Write tokens of every source into out[row[q]] for the copies q = 0..home - 1; instance `home` is the home.

    left [R]: tokens of the expert by source; left and quota [Q] are used up. What no copy takes is the home's. Rows
    of `out` that are written must be zero before.
    """
    needed = np.int64(0)
    for q in range(home + 1):
        r = rank[q]
        here = min(left[r], quota[q])
        left[r] -= here
        quota[q] -= here
        if q < home:
            out[row[q], r] = here
            needed += quota[q]
    at_node = np.int64(-1)
    start = np.int64(0)
    for q in range(home + 1):
        if needed == 0:
            break  # the home serves the rest, wherever that is
        if node[q] != at_node:
            at_node = node[q]
            start = at_node * group
        before = quota[q]
        start = _pour(left, quota, q, start, (at_node + 1) * group, row[q] if q < home else -1, out)
        if q < home:
            needed -= before - quota[q]
    if needed > 0:
        start = np.int64(0)
        for q in range(home):
            start = _pour(left, quota, q, start, left.size, row[q], out)
