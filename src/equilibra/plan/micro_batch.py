"""One layer and one micro-batch: loads, the split over nodes, flash copies, the split over sources, in one kernel.

Symbols: R ranks, E experts, N nodes, G ranks per node, C standing copies of the layer, I = E + C instances.

`scratch_for` packs a layer's constants and scratch memory into one array, because every array argument costs a compiled
call 0.1 us. `balance_micro_batches` plans all micro-batches of a layer. One node and several have separate kernels, so
neither waits for the other's compilation; Python handles scarce slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.placement import Cluster
from equilibra.plan import replicate
from equilibra.plan.across import serve_across
from equilibra.plan.level import level_nodes, split_expert
from equilibra.plan.replicate import BASE, ITEM, RANK, SCARCE, TOKENS, level_node, level_scarce_node

TRIES = 6
"""orders of exporters tried when planning ahead; each takes a few microseconds for 64 ranks"""
QUICK_TRIES = 1
"""orders tried when a caller waits: about one copy in thirty more, in a third of the time"""
NO_EXCHANGE = -1.0
"""no copies to even out traffic across nodes"""
SMALL_GROUP = 16
"""ranks per node up to which the planner aims at half the tolerance: one more copy costs little there"""
_FIRST_NODE = np.int64(0)  # typed: numba compiles again for every literal

# Rows of the scratch.
_EXPERT_OF, _COPY_OF, _INSTANCE_LOAD = tuple(range(replicate.NUM_ROWS, replicate.NUM_ROWS + 3))  # [I]
_HOME, _HOME_NODE, _LOAD, _HEAD = tuple(range(replicate.NUM_ROWS + 3, replicate.NUM_ROWS + 7))  # [E]
_FIRST, _FIRST_OF_NODE, _NODE_LOAD = tuple(range(replicate.NUM_ROWS + 7, replicate.NUM_ROWS + 10))  # ranks, nodes
_ST_EXPERT, _ST_RANK, _ST_NODE, _SHARE = tuple(range(replicate.NUM_ROWS + 10, replicate.NUM_ROWS + 14))  # [C]
_AFTER, _Q_RANK, _Q_NODE, _Q_LEFT, _Q_ROW, _LEFT = tuple(range(replicate.NUM_ROWS + 14, replicate.NUM_ROWS + 20))
_NUM_ROWS = replicate.NUM_ROWS + 20

# Rows of the copies that the kernel returns.
EXPERT, TARGET, ORIGIN, QUOTA, NODE = 0, 1, 2, 3, 4


def scratch_for(
    cluster: Cluster,
    home_of_expert: NDArray[np.int32],
    slots: int,
    standing_expert: NDArray[np.integer] | None = None,
    standing_rank: NDArray[np.integer] | None = None,
) -> NDArray[np.int64]:
    """The scratch for one layer's homes [E] and standing copies (sorted by expert, then rank)."""
    num_experts, num_ranks, group = home_of_expert.size, cluster.num_ranks, cluster.ranks_per_node
    standing_expert = np.zeros(0, np.int64) if standing_expert is None else standing_expert
    standing_rank = np.zeros(0, np.int64) if standing_rank is None else standing_rank
    num_standing = standing_expert.size
    rank_of_instance = np.concatenate([home_of_expert, standing_rank])
    by_rank = np.argsort(rank_of_instance, kind="stable")
    first = np.searchsorted(rank_of_instance[by_rank], np.arange(num_ranks + 1))
    first_of_node = first[::group]
    width = 2 + max(by_rank.size, num_ranks * (slots + 2) + num_standing, cluster.num_nodes * (group + 1))
    scratch = np.zeros((_NUM_ROWS, width), np.int64)
    scratch[_EXPERT_OF, : by_rank.size] = np.concatenate([np.arange(num_experts), standing_expert])[by_rank]
    scratch[_COPY_OF, : by_rank.size] = np.concatenate([np.full(num_experts, -1), np.arange(num_standing)])[by_rank]
    scratch[_HOME, :num_experts] = home_of_expert
    scratch[_HOME_NODE, :num_experts] = home_of_expert // group
    for node in range(cluster.num_nodes):
        ranks = slice(node * (group + 1), (node + 1) * (group + 1))
        scratch[_FIRST, ranks] = first[node * group : (node + 1) * group + 1] - first_of_node[node]
    scratch[_FIRST_OF_NODE, : first_of_node.size] = first_of_node
    scratch[_ST_EXPERT, :num_standing] = standing_expert
    scratch[_ST_RANK, :num_standing] = standing_rank
    scratch[_ST_NODE, :num_standing] = standing_rank // group
    return scratch


@inlined
def _sum_sources(tokens_ER, b):  # type: ignore[no-untyped-def]
    num_experts, num_ranks = tokens_ER.shape
    for e in range(num_experts):
        load = np.int64(0)
        for r in range(num_ranks):
            load += tokens_ER[e, r]
        b[_LOAD, e] = load


@inlined
def _target_and_cap(load_of_fullest, group, tolerance):  # type: ignore[no-untyped-def]
    """The mean rank of the fullest node, and the load that ranks are brought to."""
    target = (load_of_fullest + group - 1) // group
    return target, target + np.int64((tolerance if group > SMALL_GROUP else 0.5 * tolerance) * target)


@kernel
def _begin_node(tokens_ER, b, group, tolerance):  # type: ignore[no-untyped-def]
    """Loads of experts and instances on one node; returns the target and the cap."""
    _sum_sources(tokens_ER, b)
    total = np.int64(0)
    for i in range(tokens_ER.shape[0]):
        b[_INSTANCE_LOAD, i] = b[_LOAD, b[_EXPERT_OF, i]]
        total += b[_INSTANCE_LOAD, i]
    for r in range(group):
        b[BASE, r] = 0
    return _target_and_cap(total, group, tolerance)


@kernel
def _begin_nodes(tokens_ER, b, num_nodes, group, tolerance, hold, num_standing, near_first):  # type: ignore[no-untyped-def]
    """Loads of experts, then of instances once standing copies have levelled the nodes; returns the target and the cap.

    hold: what every standing copy with rows adds to its node. near_first: standing copies start with the tokens of
    their own node, so that fewer cross nodes.
    """
    num_experts = tokens_ER.shape[0]
    _sum_sources(tokens_ER, b)
    for n in range(num_nodes):
        b[_NODE_LOAD, n] = 0
    for e in range(num_experts):
        b[_NODE_LOAD, b[_HOME_NODE, e]] += b[_LOAD, e]
        b[_HEAD, e] = b[_LOAD, e]  # for now: what is left at home
    if num_standing > 0:
        for c in range(num_standing):
            b[_SHARE, c] = 0
            b[_NODE_LOAD, b[_ST_NODE, c]] += hold
            if near_first:
                e, node = b[_ST_EXPERT, c], b[_ST_NODE, c]
                for r in range(node * group, (node + 1) * group):
                    b[_SHARE, c] += tokens_ER[e, r]
                b[_NODE_LOAD, node] += b[_SHARE, c]
                b[_NODE_LOAD, b[_HOME_NODE, e]] -= b[_SHARE, c]
        level_nodes(
            b[_NODE_LOAD, :num_nodes], b[_SHARE], b[_LOAD], b[_ST_EXPERT], b[_ST_NODE], b[_HOME_NODE], num_standing
        )
        for c in range(num_standing):
            b[_HEAD, b[_ST_EXPERT, c]] -= b[_SHARE, c]
            if b[_SHARE, c] == 0:
                b[_NODE_LOAD, b[_ST_NODE, c]] -= hold
    for i in range(num_experts + num_standing):
        copy = b[_COPY_OF, i]
        b[_INSTANCE_LOAD, i] = b[_SHARE, copy] if copy >= 0 else b[_HEAD, b[_EXPERT_OF, i]]
    fullest = np.int64(0)
    for n in range(num_nodes):
        fullest = max(fullest, b[_NODE_LOAD, n])
    return _target_and_cap(fullest, group, tolerance)


@kernel
def _hold_standing(b, node, group, hold, num_standing):  # type: ignore[no-untyped-def]
    """Row BASE: what standing copies with rows cost the ranks of a node."""
    for r in range(group):
        b[BASE, r] = 0
    for c in range(num_standing):
        if b[_ST_NODE, c] == node and b[_SHARE, c] > 0:
            b[BASE, b[_ST_RANK, c] - node * group] += hold


@kernel
def _collect(b, node, group, found, copies, n):  # type: ignore[no-untyped-def]
    """Write the copies that were found on a node from entry n on; returns the entry after them."""
    for c in range(found):
        i = b[_FIRST_OF_NODE, node] + b[ITEM, c]
        e = b[_EXPERT_OF, i]
        copy = b[_COPY_OF, i]
        copies[EXPERT, n] = e
        copies[TARGET, n] = node * group + b[RANK, c]
        copies[ORIGIN, n] = b[_HOME, e] if copy < 0 else b[_ST_RANK, copy]
        copies[QUOTA, n] = b[TOKENS, c]
        copies[NODE, n] = node
        if copy >= 0:
            b[_SHARE, copy] -= b[TOKENS, c]
        n += 1
    return n


@kernel
def _split(tokens_ER, b, group, copies, start, end, out):  # type: ignore[no-untyped-def]
    """Split every expert that has a flash copy over its sources, on one node; copies are the entries start to end."""
    num_ranks = tokens_ER.shape[1]
    for c in range(start, end):
        b[_HEAD, copies[EXPERT, c]] = -1
    for c in range(end - 1, start - 1, -1):  # lists of copies by expert
        e = copies[EXPERT, c]
        b[_AFTER, c - start] = b[_HEAD, e]
        b[_HEAD, e] = c
    left, rank, node, quota, row = b[_LEFT, :num_ranks], b[_Q_RANK], b[_Q_NODE], b[_Q_LEFT], b[_Q_ROW]
    for entry in range(start, end):
        e = copies[EXPERT, entry]
        c = b[_HEAD, e]
        if c < 0:
            continue
        b[_HEAD, e] = -1  # each expert once
        for r in range(num_ranks):
            left[r] = tokens_ER[e, r]
        q = 0
        at_home = b[_LOAD, e]
        while c >= 0:
            row[q] = c
            rank[q] = copies[TARGET, c]
            node[q] = copies[NODE, c]
            quota[q] = copies[QUOTA, c]
            at_home -= quota[q]
            q += 1
            c = b[_AFTER, c - start]
        rank[q] = b[_HOME, e]
        node[q] = b[_HOME_NODE, e]
        quota[q] = at_home
        split_expert(left, rank, node, quota, q, group, row, out)


@kernel
def _split_across(  # type: ignore[no-untyped-def]
    tokens_ER, b, group, slots, tolerance, hold, serve, min_tokens, row_slack, copies, start, end, standing_CR, out
):
    """Split every expert that has a copy on several nodes; returns the end of the flash copies, which may grow."""
    num_experts, num_ranks = tokens_ER.shape
    num_standing = standing_CR.shape[0]
    expert, rank, quota, origin = np.zeros((4, num_standing + num_ranks * slots + 1), np.int64)
    for c in range(num_standing):
        expert[c] = b[_ST_EXPERT, c]
        rank[c] = b[_ST_RANK, c]
        quota[c] = b[_SHARE, c]
    for c in range(end - start):
        expert[num_standing + c] = copies[EXPERT, start + c]
        rank[num_standing + c] = copies[TARGET, start + c]
        quota[num_standing + c] = copies[QUOTA, start + c]
        origin[num_standing + c] = copies[ORIGIN, start + c]
    total = serve_across(
        tokens_ER, b[_LOAD, :num_experts], b[_HOME, :num_experts], group, slots, tolerance, hold, serve, min_tokens,
        row_slack, num_standing, num_standing + end - start, expert, rank, quota, origin, standing_CR, out[start:],
    )  # fmt: skip
    for c in range(num_standing, total):
        to = start + c - num_standing
        copies[EXPERT, to] = expert[c]
        copies[TARGET, to] = rank[c]
        copies[QUOTA, to] = quota[c]
        copies[ORIGIN, to] = origin[c]
        copies[NODE, to] = rank[c] // group
    return start + total - num_standing


@kernel
def balance_on_node(  # type: ignore[no-untyped-def]
    tokens_MLER, layer, m, n, b, group, slots, tolerance, hold, serve, min_tokens, tries, first_of, copies, out
):
    """Plan micro-batches from m on, on one node; returns the first whose slots are too few, and the end of copies."""
    num_experts = tokens_MLER.shape[2]
    while m < tokens_MLER.shape[0]:
        tokens_ER = tokens_MLER[m, layer]
        target, cap = _begin_node(tokens_ER, b, group, tolerance)
        found = level_node(
            b[_INSTANCE_LOAD, :num_experts], b[_FIRST, : group + 1], slots, cap, cap - target, hold, serve, min_tokens,
            tries, b,
        )  # fmt: skip
        if found == SCARCE:
            break
        if found > 0:
            end = _collect(b, _FIRST_NODE, group, found, copies, n)
            _split(tokens_ER, b, group, copies, n, end, out)
            n = end
        m += 1
        first_of[m] = n
    return m, n


@kernel
def balance_on_nodes(  # type: ignore[no-untyped-def]
    tokens_MLER, layer, m, n, b, num_nodes, group, slots, tolerance, hold, serve, min_tokens, tries, row_slack,
    first_of, copies, standing_MCR, out,
):  # fmt: skip
    """`balance_on_node` for several nodes, with standing copies."""
    num_standing = standing_MCR.shape[1]
    while m < tokens_MLER.shape[0]:
        tokens_ER = tokens_MLER[m, layer]
        target, cap = _begin_nodes(tokens_ER, b, num_nodes, group, tolerance, hold, num_standing, row_slack >= 0)
        end = n
        for node in range(num_nodes):
            load = b[_INSTANCE_LOAD, b[_FIRST_OF_NODE, node] : b[_FIRST_OF_NODE, node + 1]]
            first = b[_FIRST, node * (group + 1) : (node + 1) * (group + 1)]
            _hold_standing(b, node, group, hold, num_standing)
            found = level_node(load, first, slots, cap, cap - target, hold, serve, min_tokens, tries, b)
            if found == SCARCE:
                return m, n
            end = _collect(b, node, group, found, copies, end)
        n = _split_across(
            tokens_ER, b, group, slots, tolerance, hold, serve, min_tokens, row_slack, copies, n, end,
            standing_MCR[m], out,
        )  # fmt: skip
        m += 1
        first_of[m] = n
    return m, n


class FlashCopies(NamedTuple):
    """Flash copies of the micro-batches of one layer."""

    first_of_micro_batch: NDArray[np.int64]
    """[M + 1] those of micro-batch m are first_of_micro_batch[m] to first_of_micro_batch[m + 1] - 1"""
    copies: NDArray[np.int64]
    """[5, F] rows EXPERT, TARGET, ORIGIN, QUOTA and NODE"""
    tokens_FR: NDArray[np.int32]
    """[F, R] tokens of each source that each serves"""


class CopyCosts(NamedTuple):
    """The costs that decide whether a flash copy is made, all in rows but the tolerance."""

    tolerance: float
    """imbalance accepted for fewer copies"""
    hold: int = 0
    """cost of a copy to the rank that holds it"""
    serve: int = 0
    """its cost to the rank it comes from"""
    min_tokens: int = 0
    """rows by which it must relieve the rank it comes from"""
    tries: int = QUICK_TRIES
    """orders of exporters to try"""


def balance_micro_batches(
    tokens_MLER: NDArray[np.int32], layer: int, b: NDArray[np.int64], cluster: Cluster, slots: int, costs: CopyCosts,
    row_slack: float, standing_MCR: NDArray[np.int32],
) -> FlashCopies:  # fmt: skip
    """Flash copies of every micro-batch of a layer; standing_MCR, zero before, gets the tokens standing copies serve.

    b: from `scratch_for`. row_slack: see `across`; below 0, no copies are made for traffic.
    """
    num_micro_batches, num_ranks = len(tokens_MLER), cluster.num_ranks
    most = num_micro_batches * num_ranks * slots + 1
    first_of = np.zeros(num_micro_batches + 1, np.int64)
    copies = np.empty((5, most), np.int64)
    out = np.zeros((most, num_ranks), np.int32)
    m = n = 0
    while True:
        if cluster.num_nodes == 1:
            m, n = balance_on_node(tokens_MLER, layer, m, n, b, num_ranks, slots, *costs, first_of, copies, out)
        else:
            m, n = balance_on_nodes(
                tokens_MLER, layer, m, n, b, cluster.num_nodes, cluster.ranks_per_node, slots, *costs, row_slack,
                first_of, copies, standing_MCR, out,
            )  # fmt: skip
        if m == num_micro_batches:
            return FlashCopies(first_of_micro_batch=first_of, copies=copies[:, :n], tokens_FR=out[:n])
        n = _balance_scarce(tokens_MLER[m, layer], n, b, cluster, slots, costs, row_slack, copies, standing_MCR[m], out)
        m += 1
        first_of[m] = n


def _balance_scarce(
    tokens_ER: NDArray[np.int32], n: int, b: NDArray[np.int64], cluster: Cluster, slots: int, costs: CopyCosts,
    row_slack: float, copies: NDArray[np.int64], standing_CR: NDArray[np.int32], out: NDArray[np.int32],
) -> int:  # fmt: skip
    """Balance one micro-batch where the slots of a node do not suffice; returns the end of all copies."""
    group, num_nodes, num_standing = cluster.ranks_per_node, cluster.num_nodes, len(standing_CR)
    tolerance, hold, serve, min_tokens, tries = costs
    if num_nodes == 1:
        target, cap = _begin_node(tokens_ER, b, group, tolerance)
    else:
        target, cap = _begin_nodes(tokens_ER, b, num_nodes, group, tolerance, hold, num_standing, row_slack >= 0)
    end = n
    for node in range(num_nodes):
        load = b[_INSTANCE_LOAD, b[_FIRST_OF_NODE, node] : b[_FIRST_OF_NODE, node + 1]]
        first = b[_FIRST, node * (group + 1) : (node + 1) * (group + 1)]
        _hold_standing(b, node, group, hold, num_standing)
        found = level_scarce_node(load, first, slots, cap, cap - target, hold, serve, min_tokens, tries, b)
        end = _collect(b, node, group, found, copies, end)
    if num_nodes == 1:
        _split(tokens_ER, b, group, copies, n, end, out)
        return end
    after: int = _split_across(
        tokens_ER, b, group, slots, tolerance, hold, serve, min_tokens, row_slack, copies, n, end, standing_CR, out
    )
    return after
