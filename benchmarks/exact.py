"""Exact flash copies by mixed-integer programming: the reference for `replicate`, for small instances only.

Symbols: E experts, R ranks, S spare slots per rank; y[e, r] whether rank r gets a copy of expert e, x[e, r] the tokens
of e that r computes, z the slowest rank.

Model. Tokens of an expert stay on the node of its home, so nodes are independent. Per node: minimise z (or the number
of copies) such that sum_r x[e, r] = load[e], x[e, r] <= load[e] * y[e, r] away from home, sum_e y[e, r] <= S and
sum_e x[e, r] <= z. Tokens are whole numbers, x is not: for fixed y the rest is a transport problem with whole
capacities, which has a whole solution whenever it has any, so the best whole z is the fractional one rounded up. Copies
may cost tokens: a rank then also has hold * sum_e y[e, r], and serve * y[e, r'] for its own experts e on other ranks
r'.

Promise: `makespan` can be reached (it is recomputed with the copies fixed), and no plan is below `bound`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster

_SLACK = 1e-5
"""HiGHS tolerance in tokens; small enough that rounding to whole tokens removes it"""


@dataclass(frozen=True, kw_only=True)
class ExactMakespan:
    """The smallest slowest-rank load that flash copies can reach."""

    makespan: int
    """tokens of the slowest rank in the best plan found"""
    bound: int
    """lower bound on the tokens of the slowest rank, for any plan"""

    @property
    def proven(self) -> bool:
        return self.makespan == self.bound


@dataclass(frozen=True, kw_only=True)
class _Node:
    """One node as matrices over the variables x (E * R of them), y (E * R) and z (one)."""

    load: NDArray[np.int64]
    home: NDArray[np.int64]
    ranks: int
    slots: int
    hold: int = 0
    serve: int = 0

    @property
    def num_x(self) -> int:
        return self.load.size * self.ranks

    def away(self) -> NDArray[np.bool_]:
        """[E * R] whether an instance there is a copy."""
        away: NDArray[np.bool_] = (self.home[:, None] != np.arange(self.ranks)).ravel()
        return away

    def prices(self) -> NDArray[np.float64]:
        """[R, E * R] what every copy costs every rank."""
        expert_of, rank_of = np.divmod(np.arange(self.num_x), self.ranks)
        prices = np.zeros((self.ranks, self.num_x))
        prices[rank_of, np.arange(self.num_x)] += self.hold
        prices[self.home[expert_of], np.arange(self.num_x)] += self.serve
        return prices * self.away()


def exact_makespan(
    load: NDArray[np.integer],
    home: NDArray[np.integer],
    cluster: Cluster,
    *,
    slots: int,
    hold_rows: int = 0,
    serve_rows: int = 0,
    time_limit_s: float = 60.0,
) -> ExactMakespan:
    """The smallest slowest rank with at most `slots` copies received per rank, inside every node.

    hold_rows, serve_rows: what a copy costs the rank that holds it and the home, in tokens.
    """
    nodes = [replace(node, hold=hold_rows, serve=serve_rows) for node in _nodes(load, home, cluster, slots)]
    found = [_node_makespan(node, time_limit_s) for node in nodes]
    return ExactMakespan(makespan=max(f.makespan for f in found), bound=max(f.bound for f in found))


def exact_fewest_copies(
    load: NDArray[np.integer],
    home: NDArray[np.integer],
    cluster: Cluster,
    *,
    slots: int,
    cap: int,
    time_limit_s: float = 60.0,
) -> int | None:
    """The fewest copies with which no rank exceeds `cap` tokens; None if it cannot be reached."""
    total = 0
    for node in _nodes(load, home, cluster, slots):
        copies = _node_copies(node, cap, time_limit_s)
        if copies is None:
            return None
        total += copies
    return total


def _nodes(load: NDArray[np.integer], home: NDArray[np.integer], cluster: Cluster, slots: int) -> list[_Node]:
    load, home = np.asarray(load), np.asarray(home)
    if load.ndim != 1 or load.shape != home.shape or load.size == 0:
        raise InputError(f"loads and homes must be [experts], at least one, not {load.shape} and {home.shape}")
    if not (np.issubdtype(load.dtype, np.integer) and np.issubdtype(home.dtype, np.integer)):
        raise InputError(f"loads and homes must be whole numbers, not {load.dtype} and {home.dtype}")
    if load.min() < 0 or home.min() < 0 or home.max() >= cluster.num_ranks or slots < 0:
        raise InputError(
            f"loads ({load.min()} at least) and slots ({slots}) must not be negative, homes ({home.min()} to "
            f"{home.max()}) must be ranks 0 to {cluster.num_ranks - 1}"
        )
    group = cluster.ranks_per_node
    nodes = []
    for node in range(cluster.num_nodes):
        here = (home // group == node) & (load > 0)
        if here.any():
            nodes.append(
                _Node(
                    load=load[here].astype(np.int64), home=home[here].astype(np.int64) % group, ranks=group, slots=slots
                )
            )
    return nodes or [_Node(load=np.zeros(1, np.int64), home=np.zeros(1, np.int64), ranks=group, slots=slots)]


def _optimize() -> Any:  # noqa: ANN401
    try:
        from scipy import optimize  # noqa: PLC0415
    except ImportError as error:
        raise InputError("exact planning needs scipy: pip install 'equilibra[bench]'") from error
    return optimize


def _rows(node: _Node) -> tuple[NDArray[np.float64], ...]:
    """Matrices over (x, y, z): tokens of each expert, copy before tokens, slots of each rank, load of each rank."""
    num_experts, ranks, num_x = node.load.size, node.ranks, node.num_x
    expert_of, rank_of = np.divmod(np.arange(num_x), ranks)
    tokens = np.zeros((num_experts, 2 * num_x + 1))
    tokens[expert_of, np.arange(num_x)] = 1
    opened = np.zeros((num_x, 2 * num_x + 1))
    opened[np.arange(num_x), np.arange(num_x)] = 1
    opened[np.arange(num_x), num_x + np.arange(num_x)] = -node.load[expert_of]
    opened = opened[node.away()]
    received = np.zeros((ranks, 2 * num_x + 1))
    received[rank_of, num_x + np.arange(num_x)] = node.away()
    loaded = np.zeros((ranks, 2 * num_x + 1))
    loaded[rank_of, np.arange(num_x)] = 1
    loaded[:, num_x : 2 * num_x] = node.prices()
    return tokens, opened, received, loaded


def _solve(node: _Node, *, cap: int | None, time_limit_s: float) -> Any:  # noqa: ANN401
    """HiGHS on one node: smallest z if cap is None, else fewest copies with z = cap."""
    optimize = _optimize()
    tokens, opened, received, loaded = _rows(node)
    loaded[:, -1] = -1
    num_x, total = node.num_x, int(node.load.sum())
    away = node.away()
    cost = np.zeros(2 * num_x + 1)
    if cap is None:
        cost[-1] = 1
    else:
        cost[num_x : 2 * num_x] = away
    low = np.zeros(2 * num_x + 1)
    high = np.concatenate([np.repeat(node.load, node.ranks), away, [total]]).astype(np.float64)
    low[-1] = -(-total // node.ranks) if cap is None else cap
    high[-1] = total if cap is None else cap
    whole = np.concatenate([np.zeros(num_x), np.ones(num_x), [0]])
    return optimize.milp(
        cost,
        integrality=whole,
        bounds=optimize.Bounds(low, high),
        constraints=[
            optimize.LinearConstraint(tokens, node.load, node.load),
            optimize.LinearConstraint(opened, -np.inf, 0),
            optimize.LinearConstraint(received, -np.inf, node.slots),
            optimize.LinearConstraint(loaded, -np.inf, 0),
        ],
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )


def _node_makespan(node: _Node, time_limit_s: float) -> ExactMakespan:
    total, num_x = int(node.load.sum()), node.num_x
    stay = int(np.bincount(node.home, weights=node.load).max())
    least = -(-total // node.ranks)
    if stay <= least or node.slots == 0 or node.ranks == 1:
        return ExactMakespan(makespan=stay, bound=stay)
    solved = _solve(node, cap=None, time_limit_s=time_limit_s)
    bound = least if solved.mip_dual_bound is None else max(least, _up(solved.mip_dual_bound))
    if solved.x is None:  # out of time before any plan was found
        return ExactMakespan(makespan=stay, bound=bound)
    opened = np.rint(solved.x[num_x : 2 * num_x]) > 0
    return ExactMakespan(makespan=min(stay, _with_copies(node, opened)), bound=bound)


def _with_copies(node: _Node, opened: NDArray[np.bool_]) -> int:
    """The slowest rank when exactly these copies exist."""
    optimize = _optimize()
    tokens, _, _, loaded = _rows(node)
    num_x = node.num_x
    loaded[:, -1] = -1
    keep = np.concatenate([np.arange(num_x), [2 * num_x]])
    most = np.repeat(node.load, node.ranks) * (opened | ~node.away())
    solved = optimize.linprog(
        np.concatenate([np.zeros(num_x), [1]]),
        A_ub=loaded[:, keep],
        b_ub=-(node.prices() @ opened),
        A_eq=tokens[:, keep],
        b_eq=node.load,
        bounds=np.stack([np.zeros(num_x + 1), np.concatenate([most, [np.inf]])], axis=1),
        method="highs",
    )
    return _up(float(solved.fun))


def _node_copies(node: _Node, cap: int, time_limit_s: float) -> int | None:
    total = int(node.load.sum())
    if total > cap * node.ranks:
        return None
    if np.bincount(node.home, weights=node.load).max() <= cap:
        return 0
    solved = _solve(node, cap=cap, time_limit_s=time_limit_s)
    if solved.status == 1:
        raise InputError(
            f"no proof within {time_limit_s} s for {node.load.size} experts on {node.ranks} ranks: allow more"
        )
    return None if solved.x is None else round(solved.fun)


def _up(value: float) -> int:
    """The value rounded up to a whole number, up to the tolerance of HiGHS."""
    return int(np.ceil(value - _SLACK * max(1.0, abs(value) * 1e-3)))
