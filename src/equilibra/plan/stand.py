"""Standing copies: which experts each node keeps a second instance of for a whole step, in one layer.

Symbols: M micro-batches, N nodes, E experts; load_EM the tokens of each expert in each micro-batch.

The slowest node sets the pace: cost is sum_m max_n load[m, n]. A copy of expert e on node n lets every micro-batch move
any part of e's tokens there; weights and gradients cross the network once a step. `level.py` finds the best split for
given copies. Copies are chosen greedily by the sum of squares of node loads, then (if few) exchanged one by one while
the cost falls, then dropped where they gain less than their price.

Promises: at most `slots` copies per node; no copy that gains less than `price`; the same copies on every machine.
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import kernel
from equilibra.plan.level import level_from_home, level_on

_LARGEST = 1 << 27
_WIDE = 10_000  # experts times nodes times micro-batches up to which more candidates are tried
_ONE = np.int64(1)
_EXCHANGED = 60_000  # copies squared times micro-batches up to which exchanges take milliseconds


@kernel
def _best_candidates(  # type: ignore[no-untyped-def]
    load_EM, home_node, x_NM, free, copy_expert, copy_node, share_CM, num_copies, best
):
    """Write into best [3, width] the (gain, expert, node) of the copies that lower squares of node loads most; returns
    how many there are.
    """
    width = best.shape[1]
    num_experts, num_micro_batches = load_EM.shape
    num_nodes = x_NM.shape[0]
    at_home = np.empty(num_micro_batches, np.int64)
    taken = np.zeros(num_nodes, np.bool_)
    highest = np.int64(0)
    for n in range(num_nodes):
        for m in range(num_micro_batches):
            highest = max(highest, x_NM[n, m])
    shift = 0  # keeps the squares of huge loads within 64 bits
    while highest >> shift >= _LARGEST:
        shift += 1
    most_NN = np.zeros((num_nodes, num_nodes), np.int64)  # what a copy could gain at most, were its expert large enough
    for h in range(num_nodes):
        for n in range(num_nodes):
            for m in range(num_micro_batches):
                slope = max(x_NM[h, m] - x_NM[n, m], 0) >> shift
                most_NN[h, n] += (slope >> 1) * (slope - (slope >> 1))
    found = 0
    for e in range(num_experts):
        home = home_node[e]
        for n in range(num_nodes):
            taken[n] = False
        for m in range(num_micro_batches):
            at_home[m] = load_EM[e, m]
        for c in range(num_copies):
            if copy_expert[c] == e:
                taken[copy_node[c]] = True
                for m in range(num_micro_batches):
                    at_home[m] -= share_CM[c, m]
        for n in range(num_nodes):
            if n == home or free[n] <= 0 or taken[n]:
                continue
            if found == width and most_NN[home, n] <= best[0, found - 1]:
                continue
            gain = np.int64(0)
            for m in range(num_micro_batches):
                slope = max(x_NM[home, m] - x_NM[n, m], 0) >> shift
                amount = min(slope >> 1, at_home[m] >> shift)
                gain += amount * (slope - amount)
            if gain <= 0 or (found == width and gain <= best[0, found - 1]):
                continue
            k = found if found < width else found - 1
            while k > 0 and best[0, k - 1] < gain:
                for row in range(3):
                    best[row, k] = best[row, k - 1]
                k -= 1
            best[0, k], best[1, k], best[2, k] = gain, e, n
            found = min(found + 1, width)
    return found


@kernel
def _insert(copy_expert, copy_node, num_copies, expert, node):  # type: ignore[no-untyped-def]
    k = num_copies
    while k > 0 and (copy_expert[k - 1] > expert or (copy_expert[k - 1] == expert and copy_node[k - 1] > node)):
        copy_expert[k], copy_node[k] = copy_expert[k - 1], copy_node[k - 1]
        k -= 1
    copy_expert[k], copy_node[k] = expert, node
    return k


@kernel
def _remove(copy_expert, copy_node, num_copies, k):  # type: ignore[no-untyped-def]
    for i in range(k, num_copies - 1):
        copy_expert[i], copy_node[i] = copy_expert[i + 1], copy_node[i + 1]


@kernel
def _add(to, i, rows, k, times):  # type: ignore[no-untyped-def]
    """to[i] += times * rows[k]; loops compile in a fraction of the time that array expressions take."""
    for m in range(to.shape[1]):
        to[i, m] += times * rows[k, m]


@kernel
def _copy(rows, to):  # type: ignore[no-untyped-def]
    for i in range(rows.shape[0]):
        for m in range(rows.shape[1]):
            to[i, m] = rows[i, m]


@kernel
def _by_use(share_CM, n, copy_expert, copy_node):  # type: ignore[no-untyped-def]
    """[n, 3] (tokens, expert, node) of every copy, the least used first."""
    table = np.empty((n, 3), np.int64)
    for c in range(n):
        used = np.int64(0)
        for m in range(share_CM.shape[1]):
            used += share_CM[c, m]
        k = c
        while k > 0 and table[k - 1, 0] > used:
            for i in range(3):
                table[k, i] = table[k - 1, i]
            k -= 1
        table[k, 0], table[k, 1], table[k, 2] = used, copy_expert[c], copy_node[c]
    return table


@kernel
def choose_standing_copies(  # type: ignore[no-untyped-def]
    load_EM, home_node, num_nodes, slots, price, good_enough, rounds, copy_expert, copy_node
):
    """Copies into copy_expert, copy_node (sorted by expert, node); returns (copies, sum_m max_n with them).

    price: tokens of a node, summed over micro-batches, that a copy must gain. good_enough: cost at which to stop.
    rounds: how often every copy is tried against others.
    """
    num_experts, num_micro_batches = load_EM.shape
    base_NM = np.zeros((num_nodes, num_micro_batches), np.int64)
    for e in range(num_experts):
        _add(base_NM, home_node[e], load_EM, e, _ONE)
    x_NM = np.empty((num_nodes, num_micro_batches), np.int64)
    most = num_nodes * slots
    share_CM = np.zeros((most + 1, num_micro_batches), np.int64)
    free = np.full(num_nodes, slots, np.int64)
    best = np.zeros((3, 10 if load_EM.size * num_nodes <= _WIDE else 3), np.int64)
    n = np.int64(0)
    cost = level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, n, x_NM, share_CM)
    cost_without = cost
    while n < most and cost > good_enough:
        found = _best_candidates(load_EM, home_node, x_NM, free, copy_expert, copy_node, share_CM, n, best)
        if found == 0:
            break
        at = _insert(copy_expert, copy_node, n, best[1, 0], best[2, 0])
        for m in range(num_micro_batches):
            for c in range(n, at, -1):
                share_CM[c, m] = share_CM[c - 1, m]
            share_CM[at, m] = 0
        free[best[2, 0]] -= 1
        n += 1
        cost = level_on(load_EM, home_node, copy_expert, copy_node, n, x_NM, share_CM)
    if n * n * num_micro_batches > _EXCHANGED:
        rounds = 0
    for _ in range(rounds):
        before = cost
        k = 0
        while k < n and cost > good_enough:
            old_expert, old_node = copy_expert[k], copy_node[k]
            _remove(copy_expert, copy_node, n, k)
            free[old_node] += 1
            level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, n - 1, x_NM, share_CM)
            found = _best_candidates(load_EM, home_node, x_NM, free, copy_expert, copy_node, share_CM, n - 1, best)
            pick_expert, pick_node = old_expert, old_node
            for i in range(found):
                expert, node = best[1, i], best[2, i]
                if expert == old_expert and node == old_node:
                    continue
                at = _insert(copy_expert, copy_node, n - 1, expert, node)
                new_cost = level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, n, x_NM, share_CM)
                _remove(copy_expert, copy_node, n, at)
                if new_cost < cost:
                    cost, pick_expert, pick_node = new_cost, expert, node
            _insert(copy_expert, copy_node, n - 1, pick_expert, pick_node)
            free[pick_node] -= 1
            k += 1
        if before - cost <= max(price, before >> 12):
            break
    # Drop what does not pay, the least used first: each copy is tried once.
    cost = level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, n, x_NM, share_CM)
    tried = _by_use(share_CM, n, copy_expert, copy_node)
    x_before, share_before = np.empty_like(x_NM), np.empty_like(share_CM)
    for c in range(len(tried)):
        expert, node = tried[c, 1], tried[c, 2]
        at = np.int64(0)
        while copy_expert[at] != expert or copy_node[at] != node:
            at += 1
        _copy(x_NM, x_before)
        _copy(share_CM, share_before)
        _add(x_NM, home_node[expert], share_CM, at, _ONE)
        _add(x_NM, node, share_CM, at, -_ONE)
        for m in range(num_micro_batches):
            for i in range(at, n - 1):
                share_CM[i, m] = share_before[i + 1, m]
        _remove(copy_expert, copy_node, n, at)
        without = level_on(load_EM, home_node, copy_expert, copy_node, n - 1, x_NM, share_CM)
        if without - cost < max(price, 1) or without <= good_enough:
            n, cost = n - 1, without
        else:
            _insert(copy_expert, copy_node, n - 1, expert, node)
            _copy(x_before, x_NM)
            _copy(share_before, share_CM)
    cost = level_from_home(load_EM, home_node, base_NM, copy_expert, copy_node, n, x_NM, share_CM)
    if cost + n * price > cost_without:  # two copies that only help together may cost more than they gain
        return 0, cost_without
    return n, cost
