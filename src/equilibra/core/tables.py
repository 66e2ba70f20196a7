"""Kernels of a visit's tables: rows numbered by (rank, expert, token), and grouped by (instance, source, token).

Symbols: T tokens on this rank, K experts per token, E experts, R ranks, I instances on this rank, N rows.
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import kernel


@kernel
def number_rows(  # type: ignore[no-untyped-def]
    experts_TK, home, first_of_expert, target, quota, token_of_row, row_of_pair, counts_RE
):
    """Give every pair an instance's rank and count, then number the rows by (rank, expert, token)."""
    num_tokens, top_k = experts_TK.shape
    num_ranks, num_experts = counts_RE.shape
    left = quota.copy()
    at = first_of_expert.copy()  # first copy of each expert that may have quota left
    rank_of_pair = np.empty((num_tokens, top_k), np.int32)
    for t in range(num_tokens):
        for k in range(top_k):
            e = experts_TK[t, k]
            while at[e] < first_of_expert[e + 1] and left[at[e]] == 0:
                at[e] += 1
            if at[e] < first_of_expert[e + 1]:
                left[at[e]] -= 1
                r = target[at[e]]
            else:
                r = home[e]
            rank_of_pair[t, k] = r
            counts_RE[r, e] += 1
    next_row = np.empty((num_ranks, num_experts), np.int32)
    row = 0
    for r in range(num_ranks):
        for e in range(num_experts):
            next_row[r, e] = row
            row += counts_RE[r, e]
    for t in range(num_tokens):
        for k in range(top_k):
            r, e = rank_of_pair[t, k], experts_TK[t, k]
            row_of_pair[t, k] = next_row[r, e]
            token_of_row[next_row[r, e]] = t
            next_row[r, e] += 1


@kernel
def group_rows(by_expert, counts_IR, received_of_grouped, grouped_of_received):  # type: ignore[no-untyped-def]
    """Received rows are by (source, expert); grouped ones by (instance, source)."""
    num_instances, num_ranks = counts_IR.shape
    first = np.empty((num_instances, num_ranks), np.int64)
    row = 0
    for i in range(num_instances):
        for s in range(num_ranks):
            first[i, s] = row
            row += counts_IR[i, s]
    row = 0
    for s in range(num_ranks):
        for i in by_expert:
            for n in range(counts_IR[i, s]):
                grouped_of_received[row] = first[i, s] + n
                received_of_grouped[first[i, s] + n] = row
                row += 1
