"""Visit: one layer of one micro-batch in one stage, with its instances and its split. Made once from the plan.

Symbols: E experts, R ranks, C standing copies and F flash copies of the visit, I instances on a rank, T tokens on a
rank, K experts per token.

The simulator, the runtime and the integrations read the same value. It makes the tables that follow from it: which row
a rank sends where, how a rank groups what it receives, which copies it holds and serves. numba is imported when the
first table is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement


class Stage(StrEnum):
    """The two passes over a rollout."""

    LOGPROB = "logprob"
    """old log-probabilities: forward only"""
    UPDATE = "update"
    """policy update: forward and backward"""

    @property
    def number(self) -> int:
        """0 or 1: how events and arrays name it."""
        return list(Stage).index(self)

    @classmethod
    def numbered(cls, number: int) -> Stage:
        return list(cls)[number]


def signed_ids(num_experts: int) -> np.dtype[np.signedinteger]:
    """The smallest type of expert ids that has room for -1, which marks tokens that are routed live."""
    return np.dtype(np.int16 if num_experts <= 2**15 else np.int32)


class VisitKey(NamedTuple):
    """Stage, micro-batch and layer of a visit."""

    stage: Stage
    micro_batch: int
    """number in the plan, -1: none"""
    layer: int
    """MoE layer, -1: none"""

    @classmethod
    def once(cls, layer: int = -1, stage: Stage = Stage.UPDATE) -> VisitKey:
        """The key of what happens once a step or outside any micro-batch."""
        return cls(stage, -1, layer)


class SendTable(NamedTuple):
    """The rows that a rank sends, sorted by (target rank, expert, token)."""

    token_of_row: NDArray[np.int32]
    """[N] the token of each row"""
    row_of_pair: NDArray[np.int32]
    """[T, K] the row of each pair"""
    counts_RE: NDArray[np.int32]
    """[R, E] rows to each rank and expert"""


class ReceiveTable(NamedTuple):
    """How a rank groups the rows it receives, which come by source, by (instance, source, token)."""

    received_of_grouped: NDArray[np.int32]
    """[N] the received row of each grouped row"""
    grouped_of_received: NDArray[np.int32]
    """[N] the inverse"""
    size_of_instance: NDArray[np.int64]
    """[I] rows of each instance"""
    size_of_source: NDArray[np.int64]
    """[R] rows from each rank"""


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyList:
    """Copies of one layer that one rank holds or serves, among consecutive ranks: those of its node, or all."""

    layer: int
    held_expert: NDArray[np.int32]
    """[n] copies in this rank's slots, by origin and expert: the order of slots"""
    held_origin: NDArray[np.int32]
    """[n] the rank each comes from"""
    served_expert: NDArray[np.int32]
    """[k] copies of this rank's instances, by target and expert"""
    served_target: NDArray[np.int32]
    """[k] the rank each goes to"""
    served_slot: NDArray[np.int64]
    """[k] its slot there"""
    num_in_node: int
    """copies that any of the ranks holds; 0: nothing is transferred"""
    first_rank: int
    """the first of the consecutive ranks"""
    num_ranks: int

    @cached_property
    def held_sizes(self) -> list[int]:
        return [int(n) for n in np.bincount(self.held_origin - self.first_rank, minlength=self.num_ranks)]

    @cached_property
    def served_sizes(self) -> list[int]:
        return [int(n) for n in np.bincount(self.served_target - self.first_rank, minlength=self.num_ranks)]

    @classmethod
    def of(
        cls, layer: int, expert: NDArray[np.int32], origin: NDArray[np.int32], holder: NDArray[np.int32], rank: int,
        ranks: range,
    ) -> CopyList:  # fmt: skip
        """The list of `rank` from the origin and holder of every copy; `ranks` exchange copies with each other."""
        order = np.lexsort((expert, origin, holder))
        expert, origin, holder = expert[order], origin[order], holder[order]
        held, served = np.flatnonzero(holder == rank), np.flatnonzero(origin == rank)
        served = served[np.lexsort((expert[served], holder[served]))]
        slot = np.arange(holder.size) - np.searchsorted(holder, holder)
        return cls(
            layer=layer, held_expert=expert[held], held_origin=origin[held], served_expert=expert[served],
            served_target=holder[served], served_slot=slot[served],
            num_in_node=int(np.count_nonzero((holder >= ranks.start) & (holder < ranks.stop))),
            first_rank=ranks.start, num_ranks=len(ranks),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Visit:
    """All instances of one layer's experts in one micro-batch, and the pairs that copies serve; homes serve the rest.

    Copies take their quota of a source's pairs of an expert first, in the order of tokens; the home takes all others.
    So every pair has exactly one instance even where there are more or fewer pairs than planned.
    """

    key: VisitKey
    home_of_expert: NDArray[np.int32]
    """[E]"""
    standing_expert: NDArray[np.int32]
    """[C] by expert and rank"""
    standing_rank: NDArray[np.int32]
    """[C]"""
    standing_tokens_CR: NDArray[np.int32]
    """[C, R] pairs of each source that each serves"""
    flash_expert: NDArray[np.int32]
    """[F] by rank, origin and expert: the order of slots"""
    flash_rank: NDArray[np.int32]
    """[F]"""
    flash_origin: NDArray[np.int32]
    """[F] the rank each is copied from"""
    flash_tokens_FR: NDArray[np.int32]
    """[F, R]"""

    @property
    def num_ranks(self) -> int:
        return int(self.flash_tokens_FR.shape[1])

    def on_rank(self, rank: int) -> NDArray[np.int32]:
        """[I] the experts of a rank's instances: homes, standing copies, flash copies, in the order they compute."""
        return np.concatenate([
            np.flatnonzero(self.home_of_expert == rank).astype(np.int32),
            self.standing_expert[self.standing_rank == rank],
            self.flash_expert[self.flash_rank == rank],
        ])  # fmt: skip

    def counts(self, load: StepLoad, rank: int) -> NDArray[np.int64]:
        """[I, R] rows that each of a rank's instances gets from each source, if the load is as planned."""
        counts_ER = load.tokens_MLER[self.key.micro_batch, self.key.layer].astype(np.int64)
        np.subtract.at(counts_ER, self.standing_expert, self.standing_tokens_CR)
        np.subtract.at(counts_ER, self.flash_expert, self.flash_tokens_FR)
        return np.concatenate([
            counts_ER[self.home_of_expert == rank],
            self.standing_tokens_CR[self.standing_rank == rank],
            self.flash_tokens_FR[self.flash_rank == rank],
        ])  # fmt: skip

    def send_table(self, experts_TK: NDArray[np.integer], rank: int) -> SendTable:
        """The table of a source rank whose tokens chose these experts."""
        from equilibra.core.tables import number_rows  # noqa: PLC0415 - numba

        num_experts = self.home_of_expert.size
        expert = np.concatenate([self.standing_expert, self.flash_expert])
        target = np.concatenate([self.standing_rank, self.flash_rank])
        quota = np.concatenate([self.standing_tokens_CR[:, rank], self.flash_tokens_FR[:, rank]])
        order = np.lexsort((target, expert))
        first_of_expert = np.searchsorted(expert[order], np.arange(num_experts + 1))
        table = SendTable(
            token_of_row=np.empty(experts_TK.size, np.int32), row_of_pair=np.empty(experts_TK.shape, np.int32),
            counts_RE=np.zeros((self.num_ranks, num_experts), np.int32),
        )  # fmt: skip
        number_rows(
            np.ascontiguousarray(experts_TK), self.home_of_expert, first_of_expert, target[order], quota[order], *table
        )
        return table

    def receive_table(self, rank: int, counts_IR: NDArray[np.int64]) -> ReceiveTable:
        """The table of a rank whose instances get these rows from each source."""
        from equilibra.core.tables import group_rows  # noqa: PLC0415 - numba

        num_rows = int(counts_IR.sum())
        received, grouped = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        group_rows(np.argsort(self.on_rank(rank), kind="stable"), counts_IR, received, grouped)
        return ReceiveTable(received, grouped, counts_IR.sum(axis=1), counts_IR.sum(axis=0))

    def copy_list(self, rank: int, ranks: range) -> CopyList:
        """The flash copies that a rank holds and serves; `ranks` exchange copies with each other."""
        return CopyList.of(self.key.layer, self.flash_expert, self.flash_origin, self.flash_rank, rank, ranks)


def only_homes(placement: Placement, key: VisitKey) -> Visit:
    """A visit without copies, for what runs outside any plan."""
    none, no_tokens = np.zeros(0, np.int32), np.zeros((0, placement.cluster.num_ranks), np.int32)
    return Visit(
        key=key, home_of_expert=placement.home_of_expert[key.layer], standing_expert=none,
        standing_rank=none, standing_tokens_CR=no_tokens, flash_expert=none, flash_rank=none, flash_origin=none,
        flash_tokens_FR=no_tokens,
    )  # fmt: skip
