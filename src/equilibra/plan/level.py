"""Level and split: tokens of experts with given copies over nodes, and over source ranks. All in whole numbers.

Symbols: M micro-batches, N nodes, E experts, C copies, R source ranks, Q instances of one expert with their quotas;
x the load of each node, share the tokens that each copy takes.

Level. The min-max split of a micro-batch over nodes is also the one of least squares (proof in docs/planner.md). It is
found by pouring one expert at a time over its nodes, lowest level first, until hardly anything moves.

Split. Quotas say how many tokens of an expert each instance serves, `split_expert` says whose: a source serves its own
rank's instance first, then its node's, then the others, in the order of ranks. No split with these quotas keeps more
tokens on their rank or on their node (proof in docs/planner.md).
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import inlined, kernel

_SWEEPS = 40


@kernel
def level_nodes(x, share, amount, copy_expert, copy_node, home_node, num_copies):  # type: ignore[no-untyped-def]
    """Level one micro-batch from its present split: shares of the copies in share [C], node loads in x [N].

    amount [E] tokens of each expert; copies of one expert must be adjacent.
    """
    if num_copies == 0:
        return
    nodes = np.empty(x.size, np.int64)
    still = np.int64(0)
    for n in range(x.size):
        still += x[n]
    still //= 4096 * x.size  # tokens moved in a sweep below which it is level
    for _ in range(_SWEEPS + 8 * x.size):  # long chains of nodes need more
        moved = np.int64(0)
        c = 0
        while c < num_copies:
            expert = copy_expert[c]
            end = c + 1
            while end < num_copies and copy_expert[end] == expert:
                end += 1
            # Take the expert's tokens off all its nodes, then pour them where the level is lowest.
            home = home_node[expert]
            at_home = amount[expert]
            for i in range(c, end):
                at_home -= share[i]
                x[copy_node[i]] -= share[i]
            x[home] -= at_home
            nodes[0] = c - 1  # stands for the home
            count = 1
            for i in range(c, end):
                k = count
                while k > 0 and x[copy_node[i]] < x[home if nodes[k - 1] < c else copy_node[nodes[k - 1]]]:
                    nodes[k] = nodes[k - 1]
                    k -= 1
                nodes[k] = i
                count += 1
            total = amount[expert]
            used = 0
            for k in range(count):
                at = x[home if nodes[k] < c else copy_node[nodes[k]]]
                if k > 0 and at * k >= total:
                    break
                total += at
                used += 1
            level = total // used
            extra = total - level * used
            for k in range(count):
                node = home if nodes[k] < c else copy_node[nodes[k]]
                new = np.int64(0)
                if k < used:
                    new = level - x[node] + (1 if k < extra else 0)
                if nodes[k] >= c:
                    moved += abs(new - share[nodes[k]])
                    share[nodes[k]] = new
                x[node] += new
            c = end
        if moved <= still:
            break


@kernel
def level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, num_copies, x_NM, share_CM):  # type: ignore[no-untyped-def]
    """Level every micro-batch from all tokens at home; returns sum_m max_n."""
    for m in range(x_NM.shape[1]):
        for n in range(x_NM.shape[0]):
            x_NM[n, m] = base_NM[n, m]
        for c in range(num_copies):
            share_CM[c, m] = 0
    return level_on(load_EM, home_node, copy_expert, copy_node, num_copies, x_NM, share_CM)


@kernel
def level_on(load_EM, home_node, copy_expert, copy_node, num_copies, x_NM, share_CM):  # type: ignore[no-untyped-def]
    """Level every micro-batch from its present split; returns sum_m max_n."""
    num_nodes, num_micro_batches = x_NM.shape
    x = np.empty(num_nodes, np.int64)
    share = np.zeros(max(num_copies, 1), np.int64)
    amount = np.zeros(home_node.size, np.int64)
    cost = np.int64(0)
    for m in range(num_micro_batches):
        for n in range(num_nodes):
            x[n] = x_NM[n, m]
        for c in range(num_copies):
            share[c] = share_CM[c, m]
            amount[copy_expert[c]] = load_EM[copy_expert[c], m]
        level_nodes(x, share, amount, copy_expert, copy_node, home_node, num_copies)
        highest = np.int64(0)
        for n in range(num_nodes):
            x_NM[n, m] = x[n]
            highest = max(highest, x[n])
        for c in range(num_copies):
            share_CM[c, m] = share[c]
        cost += highest
    return cost


@kernel
def level_micro_batches(load_EM, home_node, num_nodes, copy_expert, copy_node, near_NEM):  # type: ignore[no-untyped-def]
    """[C, M] tokens that each copy takes from its home in each micro-batch.

    near_NEM [N, E, M]: tokens of each expert whose source is on the node, or an empty array. With them, copies start
    with the tokens of their own node, and levelling moves no more than it needs: fewer tokens cross.
    """
    num_micro_batches = load_EM.shape[1]
    base_NM = np.zeros((num_nodes, num_micro_batches), np.int64)
    share_CM = np.zeros((copy_expert.size, num_micro_batches), np.int64)
    for m in range(num_micro_batches):
        for e in range(home_node.size):
            base_NM[home_node[e], m] += load_EM[e, m]
        for c in range(copy_expert.size if near_NEM.size > 0 else 0):
            share_CM[c, m] = near_NEM[copy_node[c], copy_expert[c], m]
            base_NM[copy_node[c], m] += share_CM[c, m]
            base_NM[home_node[copy_expert[c]], m] -= share_CM[c, m]
    level_on(load_EM, home_node, copy_expert, copy_node, copy_expert.size, base_NM, share_CM)
    return share_CM


# --- over sources ---


@inlined
def _pour(left, quota, q, start, end, to, out):  # type: ignore[no-untyped-def]
    """Fill quota q from the sources start..end - 1; returns the source at which the next instance goes on."""
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

    left [R]: tokens of the expert by source; left and quota [Q] are used up. The home serves what no copy takes. Rows
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
