"""Tables: which row goes where, for one layer and micro-batch, seen from one rank.

Symbols: T tokens on this rank, K experts per token, E experts, R ranks, I instances on this rank, N rows.

A pair (token, expert) is one row. Copies take their quota of a source's pairs of an expert first, in the order of
tokens; the home takes all others. So every pair has exactly one instance even where there are more or fewer pairs than
planned. Rows are sent sorted by (rank, expert, token); a rank groups what it receives by (instance, source, token).

With a plan both sides know all sizes and nothing is exchanged. Without one, sources tell their counts first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StepPlan

__all__ = ["Instances", "ReceiveTable", "SendTable", "instances_of", "planned_counts", "receive_table", "send_table"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Instances:
    """All instances of one layer's experts in one micro-batch, as every rank knows them."""

    home_of_expert: NDArray[np.int32]
    """[E]"""
    standing_expert: NDArray[np.int32]
    """[C] of this layer, by expert and rank"""
    standing_rank: NDArray[np.int32]
    """[C]"""
    standing_tokens_CR: NDArray[np.int32]
    """[C, R] pairs of each source that each serves"""
    flash_expert: NDArray[np.int32]
    """[F] of this layer and micro-batch, by rank, origin and expert: the order of slots"""
    flash_rank: NDArray[np.int32]
    """[F]"""
    flash_origin: NDArray[np.int32]
    """[F]"""
    flash_tokens_FR: NDArray[np.int32]
    """[F, R]"""

    def on_rank(self, rank: int) -> NDArray[np.int32]:
        """[I] the experts of a rank's instances: homes, standing copies, flash copies, in the order they compute."""
        return np.concatenate([
            np.flatnonzero(self.home_of_expert == rank).astype(np.int32),
            self.standing_expert[self.standing_rank == rank],
            self.flash_expert[self.flash_rank == rank],
        ])  # fmt: skip


def instances_of(plan: StepPlan, stage: Stage, layer: int, micro_batch: int) -> Instances:
    """The instances of a plan's layer and micro-batch."""
    part, standing = plan.stages[stage], plan.standing
    problem = layer * plan.num_micro_batches + micro_batch
    flash = np.arange(part.first_of_problem[problem], part.first_of_problem[problem + 1])
    flash = flash[np.lexsort((part.expert[flash], part.origin[flash], part.rank[flash]))]
    first, last = np.searchsorted(standing.layer, [layer, layer + 1])
    of_layer = np.arange(first, last)
    of_layer = of_layer[np.lexsort((standing.rank[of_layer], standing.expert[of_layer]))]
    return Instances(
        home_of_expert=plan.placement.home_of_expert[layer],
        standing_expert=standing.expert[of_layer],
        standing_rank=standing.rank[of_layer],
        standing_tokens_CR=part.standing_tokens_CMR[of_layer, micro_batch],
        flash_expert=part.expert[flash],
        flash_rank=part.rank[flash],
        flash_origin=part.origin[flash],
        flash_tokens_FR=part.tokens_FR[flash],
    )


def only_homes(placement: Placement, layer: int) -> Instances:
    """A layer without copies."""
    none, num_ranks = np.zeros(0, np.int32), placement.cluster.num_ranks
    no_tokens = np.zeros((0, num_ranks), np.int32)
    return Instances(
        home_of_expert=placement.home_of_expert[layer], standing_expert=none, standing_rank=none,
        standing_tokens_CR=no_tokens, flash_expert=none, flash_rank=none, flash_origin=none, flash_tokens_FR=no_tokens,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class SendTable:
    """Where this rank's rows go."""

    token_of_row: NDArray[np.int32]
    """[N] the token each sent row is of"""
    row_of_pair: NDArray[np.int32]
    """[T, K] the sent row of each pair"""
    counts_RE: NDArray[np.int32]
    """[R, E] rows to each rank and expert"""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceiveTable:
    """How received rows, by source, are grouped by instance."""

    received_of_grouped: NDArray[np.int32]
    """[N] for every grouped row, where it was received"""
    grouped_of_received: NDArray[np.int32]
    """[N] the inverse"""
    size_of_instance: NDArray[np.int64]
    """[I] rows of each instance"""
    size_of_source: NDArray[np.int64]
    """[R] rows from each rank"""


def send_table(experts_TK: NDArray[np.int64], instances: Instances, rank: int) -> SendTable:
    """The table of a source rank."""
    num_experts, num_ranks = instances.home_of_expert.size, instances.standing_tokens_CR.shape[1]
    expert = np.concatenate([instances.standing_expert, instances.flash_expert])
    target = np.concatenate([instances.standing_rank, instances.flash_rank])
    quota = np.concatenate([instances.standing_tokens_CR[:, rank], instances.flash_tokens_FR[:, rank]])
    order = np.lexsort((target, expert))
    first_of_expert = np.searchsorted(expert[order], np.arange(num_experts + 1))
    num_tokens, top_k = experts_TK.shape
    token_of_row = np.empty(num_tokens * top_k, np.int32)
    row_of_pair = np.empty((num_tokens, top_k), np.int32)
    counts_RE = np.zeros((num_ranks, num_experts), np.int32)
    _send(experts_TK, instances.home_of_expert, first_of_expert, target[order], quota[order].copy(), token_of_row,
          row_of_pair, counts_RE)  # fmt: skip
    return SendTable(token_of_row=token_of_row, row_of_pair=row_of_pair, counts_RE=counts_RE)


@kernel
def _send(  # type: ignore[no-untyped-def]
    experts_TK, home, first_of_expert, target, left, token_of_row, row_of_pair, counts_RE
):
    """Give every pair an instance's rank and count, then number the rows by (rank, expert, token)."""
    num_tokens, top_k = experts_TK.shape
    num_ranks, num_experts = counts_RE.shape
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


def planned_counts(load: StepLoad, instances: Instances, layer: int, micro_batch: int, rank: int) -> NDArray[np.int64]:
    """[I, R] rows that each of a rank's instances gets from each source: what no one needs to exchange."""
    homes = np.flatnonzero(instances.home_of_expert == rank)
    counts_ER = load.tokens_MLER[micro_batch, layer].astype(np.int64)
    np.subtract.at(counts_ER, instances.standing_expert, instances.standing_tokens_CR)
    np.subtract.at(counts_ER, instances.flash_expert, instances.flash_tokens_FR)
    return np.concatenate([
        counts_ER[homes],
        instances.standing_tokens_CR[instances.standing_rank == rank],
        instances.flash_tokens_FR[instances.flash_rank == rank],
    ])  # fmt: skip


def receive_table(expert_of_instance: NDArray[np.int32], counts_IR: NDArray[np.int64]) -> ReceiveTable:
    """The table of a rank whose instances get these rows from each source."""
    size_of_instance, size_of_source = counts_IR.sum(axis=1), counts_IR.sum(axis=0)
    num_rows = int(size_of_source.sum())
    received = np.empty(num_rows, np.int32)
    grouped = np.empty(num_rows, np.int32)
    _group(np.argsort(expert_of_instance, kind="stable"), counts_IR, received, grouped)
    return ReceiveTable(
        received_of_grouped=received, grouped_of_received=grouped, size_of_instance=size_of_instance,
        size_of_source=size_of_source,
    )  # fmt: skip


@kernel
def _group(by_expert, counts_IR, received_of_grouped, grouped_of_received):  # type: ignore[no-untyped-def]
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
