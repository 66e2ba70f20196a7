"""The most tokens that any split with given quotas keeps on their rank, and on their node, by linear programming."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog


def most_kept(tokens_R, rank_Q, quota_Q, group, *, what):
    """Largest sum of tokens served on their own rank (what="rank") or node ("node"), over all transports."""
    num_sources, num_instances = len(tokens_R), len(rank_Q)
    kept = np.zeros((num_sources, num_instances))
    for r in range(num_sources):
        for q in range(num_instances):
            same_rank, same_node = r == rank_Q[q], r // group == rank_Q[q] // group
            kept[r, q] = same_rank if what == "rank" else same_node
    rows, sums = [], []
    for r in range(num_sources):
        row = np.zeros((num_sources, num_instances))
        row[r] = 1
        rows.append(row.ravel())
        sums.append(tokens_R[r])
    for q in range(num_instances):
        row = np.zeros((num_sources, num_instances))
        row[:, q] = 1
        rows.append(row.ravel())
        sums.append(quota_Q[q])
    solved = linprog(-kept.ravel(), A_eq=np.array(rows), b_eq=np.array(sums), method="highs")
    assert solved.status == 0, solved.message
    return round(-solved.fun)
