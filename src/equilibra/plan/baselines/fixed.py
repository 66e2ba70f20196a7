"""Planners that place experts once a step: static placement, LPT, and DeepSeek's EPLB and LPLB.

Symbols: L layers, M micro-batches, E experts, R ranks, P replicas (all instances), S redundant experts a rank holds,
C standing copies. "Batch total" is the load of the coming step, summed over micro-batches.

LPT (longest processing time) gives the heaviest expert of the batch total to the least loaded rank with room, then the
next. It levels the sum over micro-batches, not their maxima: ranks that are slow in turn look balanced.

EPLB keeps redundant experts for the whole step, from known or past loads. Per layer: pack expert groups onto nodes
(heaviest first, equally many each), give each extra replica of a node to the expert with the largest load per replica,
pack the node's replicas onto its ranks. Where groups do not divide over nodes, the cluster counts as one node with one
group. An expert's tokens are split equally over its replicas. A rank has E/R + spare_slots replicas per layer: L times
the memory of flash copies. Replicas on one rank are one instance. The home stays where it was if a replica is there,
else on its node, else at the first replica, so homes per rank may be uneven; the other instances are standing copies.

LPLB balances by linear programming with at most two instances of an expert, on a fixed graph of ranks. Redundant slot s
of rank r doubles an expert of rank origin[r, s]: an edge along which tokens move either way.
  8 ranks of one node   cube with diagonals: a ring in each half, the upright edges, and diagonals back
  16 ranks              hypercube without diagonals: a directed cycle through each pair of dimensions
  several nodes         torus: a neighbour in the node, then the same rank of the neighbour node
  otherwise, and for more slots: rings of strides 1, R/2, R/4, ..., then all others (our continuation)
Homes are packed by the batch total; the heaviest experts of a rank stand on the edges that leave it. In every
micro-batch, tokens move along paths from the fullest rank to the emptiest it can reach, until no reachable rank has two
tokens less: then all of them are level, and the whole-number optimum is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import StagePlan, StandingCopies, StepPlan
from equilibra.plan.baselines.assemble import split_copies, step_plan
from equilibra.plan.planner import StepProblem, Timing


@dataclass(frozen=True, kw_only=True)
class Static:
    """Plain expert parallelism: contiguous homes, or those of the previous placement."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "static"

    def plan(self, problem: StepProblem) -> StepPlan:
        return step_plan(problem, self.name)


@dataclass(frozen=True, kw_only=True)
class LongestFirst:
    """Homes packed by the batch total, no copies."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "lpt"

    def plan(self, problem: StepProblem) -> StepPlan:
        homes = _longest_first_homes(problem.load.expert_load().sum(axis=0), problem.cluster.num_ranks)
        return step_plan(problem, self.name, home_of_expert=homes)


def _longest_first_homes(total_LE: NDArray[np.int64], num_ranks: int) -> NDArray[np.int32]:
    """[L, E] homes packed by these loads, equally many on every rank."""
    home = np.empty(total_LE.shape, np.int32)
    for layer, total in enumerate(total_LE):
        expert_of_slot = pack_evenly(total.astype(np.float64), num_ranks)
        home[layer, expert_of_slot] = np.arange(num_ranks)[:, None]
    return home


@kernel
def pack_evenly(weight, num_bins):  # type: ignore[no-untyped-def]
    """[bins, items / bins] items of each bin: heaviest first into the lightest bin with room; one per bin in order."""
    room = weight.size // num_bins
    if room == 1:
        return np.arange(weight.size).reshape(num_bins, 1)
    item_of_slot = np.empty((num_bins, room), np.int64)
    filled = np.zeros(num_bins, np.int64)
    total = np.zeros(num_bins, np.float64)
    for item in np.argsort(-weight, kind="mergesort"):
        lightest = -1
        for b in range(num_bins):
            if filled[b] < room and (lightest < 0 or total[b] < total[lightest]):
                lightest = b
        item_of_slot[lightest, filled[lightest]] = item
        filled[lightest] += 1
        total[lightest] += weight[item]
    return item_of_slot


# --- EPLB ---


@dataclass(frozen=True, kw_only=True)
class Eplb:
    """Redundant experts by the batch total, or by the loads of the previous step."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "eplb-oracle"
    oracle: bool = True
    """use the loads of the coming step; otherwise problem.history_LE"""
    num_groups: int = 1
    """expert groups that should share a node, if the router works by groups"""

    @classmethod
    def from_history(cls) -> Eplb:
        """EPLB where loads are not known ahead: with those of the previous step."""
        return cls(name="eplb-history", oracle=False)

    def plan(self, problem: StepProblem) -> StepPlan:
        """Replicas from the loads; without history, the static plan."""
        load, cluster = problem.load, problem.cluster
        load_LE = load.expert_load().sum(axis=0) if self.oracle else problem.history_LE
        if load_LE is None:
            return step_plan(problem, self.name)
        if load_LE.shape != (load.num_layers, load.num_experts):
            raise InputError(f"history_LE is {load_LE.shape}, but the step needs {load.num_layers, load.num_experts}")
        expert_LP = eplb_replicas(
            load_LE,
            num_replicas=load.num_experts + problem.spare_slots * cluster.num_ranks,
            num_groups=self.num_groups,
            num_nodes=cluster.num_nodes,
            num_ranks=cluster.num_ranks,
        )
        replicas_LER = _replicas_on_ranks(expert_LP, load.num_experts, cluster.num_ranks)
        home, standing = _instances(replicas_LER, problem.home_now)
        tokens_CMR = _split_by_replicas(load, home, standing, replicas_LER)
        stage = StagePlan.without_flash(tokens_CMR, load.num_layers)
        return step_plan(problem, self.name, stage, home_of_expert=home, standing=standing)


def eplb_replicas(
    load_LE: NDArray[np.integer], *, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    """[L, P] the expert of every replica; replica p is on rank p // (P / R)."""
    num_experts = load_LE.shape[1]
    if num_groups < 1 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    if num_experts % num_groups or num_ranks % num_nodes or num_replicas % num_ranks or num_replicas < num_experts:
        raise InputError(
            f"cannot place {num_replicas} replicas of {num_experts} experts in {num_groups} groups on {num_ranks} "
            f"ranks of {num_nodes} nodes: replicas must be a multiple of ranks and at least as many as experts, ranks "
            f"a multiple of nodes, experts a multiple of groups"
        )
    return np.stack([_layer_replicas(load, num_replicas, num_groups, num_nodes, num_ranks) for load in load_LE])


def _layer_replicas(
    load: NDArray[np.integer], num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    expert_of_group = np.arange(load.size).reshape(num_groups, -1)
    group_of_node = pack_evenly(load[expert_of_group].sum(axis=1).astype(np.float64), num_nodes)
    expert_of_replica = []
    for groups in group_of_node:
        expert = expert_of_group[groups].ravel()
        weight = load[expert].astype(np.float64)
        member, share = _replicate(weight, num_replicas // num_nodes)
        expert_of_replica.append(expert[member[pack_evenly(share, num_ranks // num_nodes)]].ravel())
    return np.concatenate(expert_of_replica)


@kernel
def _replicate(weight, num_replicas):  # type: ignore[no-untyped-def]
    """The member each replica is of, and its share of the weight: one each, extras to the largest share."""
    member = np.arange(num_replicas)
    count = np.ones(weight.size, np.int64)
    for p in range(weight.size, num_replicas):
        member[p] = np.argmax(weight / count)
        count[member[p]] += 1
    return member, (weight / count)[member]


def _replicas_on_ranks(expert_LP: NDArray[np.int64], num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """[L, E, R] replicas of each expert on each rank."""
    num_layers, num_replicas = expert_LP.shape
    rank = np.arange(num_replicas) // (num_replicas // num_ranks)
    entry_LP = (np.arange(num_layers)[:, None] * num_experts + expert_LP) * num_ranks + rank
    count = np.bincount(entry_LP.ravel(), minlength=num_layers * num_experts * num_ranks)
    return count.reshape(num_layers, num_experts, num_ranks)


def _instances(replicas_LER: NDArray[np.int64], before: Placement) -> tuple[NDArray[np.int32], StandingCopies]:
    """One instance per rank that has a replica: one of them the home, the others standing copies."""
    node_of_rank = before.cluster.node_of_rank()
    has_LER = replicas_LER > 0
    score_LER = has_LER.astype(np.int8)
    was = before.home_of_expert[:, :, None]
    score_LER[has_LER & (node_of_rank == node_of_rank[was])] = 2
    score_LER[has_LER & (np.arange(node_of_rank.size) == was)] = 3
    home = score_LER.argmax(axis=2).astype(np.int32)
    np.put_along_axis(has_LER, home[:, :, None], values=False, axis=2)
    layer, expert, rank = (index.astype(np.int32) for index in np.nonzero(has_LER))
    return home, StandingCopies(layer=layer, expert=expert, rank=rank)


def _split_by_replicas(
    load: StepLoad, home_LE: NDArray[np.int32], standing: StandingCopies, replicas_LER: NDArray[np.int64]
) -> NDArray[np.int32]:
    """[C, M, R] tokens of each copy: an expert's tokens go to its replicas in turn, so they differ by at most one."""
    layer, expert = standing.layer, standing.expert
    own = replicas_LER[layer, expert, standing.rank]
    key = layer.astype(np.int64) * load.num_experts + expert
    before = np.cumsum(own) - own
    of_home = replicas_LER[layer, expert, home_LE[layer, expert]]
    before += of_home - before[np.searchsorted(key, key)]  # the home comes first
    own_C11, before_C11 = own[:, None, None], before[:, None, None]
    every_C11 = replicas_LER[layer, expert].sum(axis=1)[:, None, None]
    upto_CMR = load.tokens_MLER[:, layer, expert].astype(np.int64).cumsum(axis=2).transpose(1, 0, 2)
    rounds, rest = np.divmod(upto_CMR, every_C11)
    served_CMR = rounds * own_C11 + np.clip(rest - before_C11, 0, own_C11)
    return np.ascontiguousarray(np.diff(served_CMR, axis=2, prepend=0), np.int32)


# --- LPLB ---


@dataclass(frozen=True, kw_only=True)
class Lplb:
    """Redundant experts on a fixed graph, split optimally."""

    timing: ClassVar[Timing] = Timing.ONLINE
    online_us: ClassVar[float] = 100.0

    name: str = "lplb"

    def plan(self, problem: StepProblem) -> StepPlan:
        total_LE = problem.load.expert_load().sum(axis=0)
        home = _longest_first_homes(total_LE, problem.cluster.num_ranks)
        origin_RS = origin_of_slot(problem.cluster, problem.spare_slots)
        rows = [
            (layer, expert, rank)
            for layer, total in enumerate(total_LE)
            for expert, rank in _on_edges(total, home[layer], origin_RS)
        ]
        layer, expert, rank = np.array(rows, np.int32).reshape(-1, 3).T.copy()
        standing = StandingCopies(layer=layer, expert=expert, rank=rank)
        stage = StagePlan.without_flash(_split(problem, home, standing), problem.load.num_layers)
        return step_plan(problem, self.name, stage, home_of_expert=home, standing=standing)


def origin_of_slot(cluster: Cluster, slots: int) -> NDArray[np.int64]:
    """[R, S] the rank whose expert each redundant slot doubles; the same rank again only when others are used up."""
    num_ranks, group = cluster.num_ranks, cluster.ranks_per_node
    rank = np.arange(num_ranks)
    columns = []
    if num_ranks == 16:
        for shift in (0, 2):  # 00 -> 01 -> 11 -> 10 -> 00 in two bits
            before = np.array([0b10, 0b00, 0b11, 0b01])[rank >> shift & 3]
            columns.append(rank & ~(3 << shift) | before << shift)
    elif cluster.num_nodes > 1:
        columns += [rank - rank % group + (rank - 1) % group, (rank - group) % num_ranks]
    elif num_ranks == 8:
        columns += [rank - rank % 4 + (rank - 1) % 4, np.where(rank < 4, 4 + (rank + 2) % 4, rank - 4)]
    strides = [1, *(num_ranks >> k for k in range(1, num_ranks.bit_length())), *range(1, num_ranks)]
    columns += [(rank - stride) % num_ranks for stride in strides]
    origin_RS = np.empty((num_ranks, 0), np.int64)
    for again in (False, True):
        for column in columns:
            new = (column != rank) & ((column[:, None] != origin_RS).all(axis=1) | again)
            if origin_RS.shape[1] < slots and new.all():
                origin_RS = np.column_stack([origin_RS, column])
    return origin_RS


def _on_edges(total: NDArray[np.int64], home: NDArray[np.int32], origin_RS: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(expert, rank that doubles it), sorted: the heaviest experts of a rank on the edges that leave it."""
    chosen = []
    for origin in range(origin_RS.shape[0]):
        target = np.nonzero(origin_RS.T == origin)[1]  # noqa: SIM300
        expert = np.flatnonzero(home == origin)
        heaviest = expert[np.argsort(-total[expert], kind="stable")]
        chosen += list(zip(heaviest.tolist(), target.tolist(), strict=False))
    return sorted(chosen)


def _split(problem: StepProblem, home: NDArray[np.int32], standing: StandingCopies) -> NDArray[np.int32]:
    """[C, M, R] tokens of the redundant experts."""
    load, num_ranks, group = problem.load, problem.cluster.num_ranks, problem.cluster.ranks_per_node
    tokens_CMR = np.zeros((standing.num_copies, load.num_micro_batches, num_ranks), np.int32)
    first = np.searchsorted(standing.layer, np.arange(load.num_layers + 1))
    load_MLE = load.expert_load()
    for layer in range(load.num_layers):
        these = slice(first[layer], first[layer + 1])
        expert, rank = standing.expert[these], standing.rank[these]
        for m in range(load.num_micro_batches):
            x = np.zeros(num_ranks, np.int64)
            np.add.at(x, home[layer], load_MLE[m, layer])
            share = np.zeros(expert.size, np.int64)
            level_edges(x, load_MLE[m, layer][expert], home[layer][expert], rank, share)
            out = np.zeros((expert.size, num_ranks), np.int32)
            split_copies(load.tokens_MLER[m, layer], home[layer], group, expert, rank, share, out)
            tokens_CMR[these, m] = out
    return tokens_CMR


@kernel
def level_edges(x, amount, origin, target, share):  # type: ignore[no-untyped-def]
    """Lower the fullest rank as far as possible: edge c moves share[c] <= amount[c] tokens from origin[c] to target[c].

    x [R] starts as all at the origins, share [C] as 0; both are updated.
    """
    num_ranks, num_edges = x.size, amount.size
    # Edge c is 2c forward and 2c + 1 backward; lists of those that leave each rank.
    head = np.full(num_ranks, -1, np.int64)
    after = np.empty(2 * num_edges, np.int64)
    for c in range(num_edges):
        for edge, rank in ((2 * c, origin[c]), (2 * c + 1, target[c])):
            after[edge] = head[rank]
            head[rank] = edge
    came_by = np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    while True:
        source = np.argmax(x)
        came_by[:] = -1
        came_by[source] = -2
        queue[0] = source
        found, i = 1, 0
        lowest = source
        while i < found:
            edge = head[queue[i]]
            i += 1
            while edge >= 0:
                c = edge >> 1
                to = target[c] if edge & 1 == 0 else origin[c]
                free = amount[c] - share[c] if edge & 1 == 0 else share[c]
                if free > 0 and came_by[to] == -1:
                    came_by[to] = edge
                    queue[found] = to
                    found += 1
                    if x[to] < x[lowest]:
                        lowest = to
                edge = after[edge]
        moved = (x[source] - x[lowest]) // 2
        if moved == 0:
            return
        for change in (False, True):  # first how much the path allows, then move it
            rank = lowest
            while rank != source:
                edge = came_by[rank]
                c = edge >> 1
                if change:
                    share[c] += moved if edge & 1 == 0 else -moved
                else:
                    moved = min(moved, amount[c] - share[c] if edge & 1 == 0 else share[c])
                rank = origin[c] if edge & 1 == 0 else target[c]
        x[source] -= moved
        x[lowest] += moved
