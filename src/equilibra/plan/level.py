"""Level: split the tokens of experts with standing copies over nodes, for given copies.

Symbols: M micro-batches, N nodes, E experts, C copies; x the load of each node, share the tokens each copy takes.

The min-max split of a micro-batch is also the one of least squares (proof in docs/planner.md). It is found by pouring
one expert at a time over its nodes, lowest level first, until hardly anything moves. All in whole numbers.
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import kernel

__all__ = ["level_from_home", "level_micro_batches", "level_nodes", "level_on"]

_SWEEPS = 40


@kernel
def level_nodes(x, share, amount, copy_expert, copy_node, home_node, num_copies):  # type: ignore[no-untyped-def]
    """Level one micro-batch from where it is: shares of the copies in share [C], node loads in x [N].

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
    """Level every micro-batch from all at home; returns sum_m max_n."""
    for m in range(x_NM.shape[1]):
        for n in range(x_NM.shape[0]):
            x_NM[n, m] = base_NM[n, m]
        for c in range(num_copies):
            share_CM[c, m] = 0
    return level_on(load_EM, home_node, copy_expert, copy_node, num_copies, x_NM, share_CM)


@kernel
def level_on(load_EM, home_node, copy_expert, copy_node, num_copies, x_NM, share_CM):  # type: ignore[no-untyped-def]
    """Level every micro-batch from where it is; returns sum_m max_n."""
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
