"""LPLB, DeepSeek's balancer by linear programming: at most two instances of an expert, on a fixed graph of ranks.

Symbols: L layers, M micro-batches, R ranks, S redundant experts a rank holds, C standing copies.

Redundant slot s of rank r doubles an expert of rank origin[r, s]: an edge along which tokens move either way.
  8 ranks of one node   cube with diagonals: a ring in each half, the upright edges, and diagonals back
  16 ranks              hypercube without diagonals: a directed cycle through each pair of dimensions
  several nodes         torus: a neighbour in the node, then the same rank of the neighbour node
  otherwise, and for more slots: rings of strides 1, R/2, R/4, ..., then all others (our continuation)

Homes are packed by the batch total; the heaviest experts of a rank stand on the edges that leave it. In every
micro-batch, tokens move along paths from the fullest rank to the emptiest it reaches, until none it reaches has two
tokens less: then what it reaches is level, and the whole-number optimum is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel
from equilibra.core.placement import Cluster
from equilibra.core.plan import StandingCopies, StepPlan
from equilibra.plan.baselines.assemble import no_flash_copies, split_copies, step_plan
from equilibra.plan.baselines.longest_first import batch_total, longest_first_homes
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["Lplb", "level_edges", "origin_of_slot"]


@dataclass(frozen=True, kw_only=True)
class Lplb:
    """Redundant experts on a fixed graph, split optimally."""

    timing: ClassVar[Timing] = Timing.ONLINE
    online_us: ClassVar[float] = 100.0

    name: str = "lplb"

    def plan(self, problem: StepProblem) -> StepPlan:
        home = longest_first_homes(problem)
        origin_RS = origin_of_slot(problem.cluster, problem.spare_slots)
        rows = [
            (layer, expert, rank)
            for layer, total in enumerate(batch_total(problem))
            for expert, rank in _on_edges(total, home[layer], origin_RS)
        ]
        layer, expert, rank = np.array(rows, np.int32).reshape(-1, 3).T.copy()
        standing = StandingCopies(layer=layer, expert=expert, rank=rank)
        stage = no_flash_copies(problem, _split(problem, home, standing))
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
    load, num_ranks = problem.load, problem.cluster.num_ranks
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
            group = problem.cluster.ranks_per_node
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
