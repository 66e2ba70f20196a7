"""Standing copies, slowly: the best split by linear programming, the best copies by mixed-integer programming."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp


def lowest_level(amount_E, home_node_E, copies, num_nodes):
    """The smallest possible load of the fullest node, when copies (expert, node) may take any part of an expert."""
    base = np.bincount(home_node_E, weights=amount_E, minlength=num_nodes)
    num = len(copies)
    # load[n] = base[n] + shares that come - shares that go <= z; shares of an expert together at most its tokens
    rows = np.zeros((num_nodes, num + 1))
    rows[:, -1] = -1
    for c, (expert, node) in enumerate(copies):
        rows[node, c] += 1
        rows[home_node_E[expert], c] -= 1
    limits = [np.array([float(e == expert) for e, _ in copies] + [0.0]) for expert, _ in copies]
    solved = linprog(
        np.array([0.0] * num + [1.0]),
        A_ub=np.array([*rows, *limits]),
        b_ub=np.array([*-base, *(float(amount_E[expert]) for expert, _ in copies)]),
        bounds=[(0, None)] * (num + 1),
        method="highs",
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)


def best_standing_copies(load_EM, home_node_E, num_nodes, slots, price, *, time_limit_s=30.0):
    """The smallest sum over micro-batches of the fullest node, plus price per copy (fractional tokens)."""
    num_experts, num_micro_batches = load_EM.shape
    options = [(e, n) for e in range(num_experts) for n in range(num_nodes) if n != home_node_E[e]]
    num, shares = len(options), len(options) * num_micro_batches
    size = num + shares + num_micro_batches  # y[option], s[option, m], z[m]

    def share(option, m):
        return num + option * num_micro_batches + m

    rows, low, high = [], [], []

    def add(row, most):
        rows.append(row)
        low.append(-np.inf)
        high.append(most)

    for m in range(num_micro_batches):
        base = np.bincount(home_node_E, weights=load_EM[:, m], minlength=num_nodes)
        for n in range(num_nodes):
            row = np.zeros(size)
            row[num + shares + m] = -1
            for o, (e, to) in enumerate(options):
                row[share(o, m)] += (to == n) - float(home_node_E[e] == n)
            add(row, -base[n])
        for e in range(num_experts):
            row = np.zeros(size)
            for o, (other, _) in enumerate(options):
                row[share(o, m)] = other == e
            add(row, load_EM[e, m])
        for o, (e, _) in enumerate(options):
            row = np.zeros(size)
            row[share(o, m)] = 1
            row[o] = -float(load_EM[e, m])
            add(row, 0)
    for n in range(num_nodes):
        row = np.zeros(size)
        for o, (_, to) in enumerate(options):
            row[o] = to == n
        add(row, slots)
    cost = np.concatenate([np.full(num, float(price)), np.zeros(shares), np.ones(num_micro_batches)])
    whole = np.concatenate([np.ones(num), np.zeros(shares + num_micro_batches)])
    top = np.concatenate([np.ones(num), np.full(shares + num_micro_batches, np.inf)])
    solved = milp(
        cost,
        integrality=whole,
        bounds=Bounds(np.zeros(size), top),
        constraints=LinearConstraint(np.array(rows), low, high),
        options={"time_limit": time_limit_s},
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)
