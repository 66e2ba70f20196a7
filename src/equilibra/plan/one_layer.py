"""Balance one layer of one micro-batch, for other runtimes: tokens in, copies and split out, in microseconds.

Symbols: R ranks, E experts, F flash copies, C standing copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster, contiguous
from equilibra.cost.prices import MOST_ROWS
from equilibra.plan.micro_batch import (
    EXPERT,
    NO_EXCHANGE,
    ORIGIN,
    QUOTA,
    TARGET,
    CopyCosts,
    balance_micro_batches,
    scratch_for,
)

__all__ = ["Balanced", "OneLayer", "balance"]

NONE: NDArray[np.int64] = np.zeros(0, np.int64)
"""no standing copies"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Balanced:
    """Flash copies of one layer and micro-batch, and whom all copies serve; homes serve the rest."""

    expert_of_copy: NDArray[np.int64]
    """[F] copied expert"""
    rank_of_copy: NDArray[np.int64]
    """[F] rank that holds the copy"""
    origin_of_copy: NDArray[np.int64]
    """[F] rank it is copied from: the home, or a standing copy of the same node"""
    tokens_FR: NDArray[np.int32]
    """[F, R] tokens of each source rank that each flash copy serves"""
    standing_tokens_CR: NDArray[np.int32]
    """[C, R] tokens of each source rank that each standing copy serves"""
    rank_load: NDArray[np.int64]
    """[R] tokens each rank computes"""

    @property
    def imbalance(self) -> float:
        total = int(self.rank_load.sum())
        return float(self.rank_load.max() * self.rank_load.size / total) if total else 1.0


def _checked_tokens(tokens: NDArray[np.generic], cluster: Cluster) -> NDArray[np.int32]:
    if tokens.ndim != 2 or tokens.shape[1] != cluster.num_ranks or tokens.shape[0] == 0:
        raise InputError(f"tokens must be [experts, {cluster.num_ranks} source ranks], not {tokens.shape}")
    if tokens.dtype.kind not in "iuf":
        raise InputError(f"tokens must be numbers, not {tokens.dtype}")
    if not (tokens.min() >= 0 and tokens.max() < 2**31 and np.array_equal(np.floor(tokens), tokens)):
        raise InputError("tokens must be whole numbers from 0 to 2^31 - 1")
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _checked_standing(
    expert: NDArray[np.integer], rank: NDArray[np.integer], home_of_expert: NDArray[np.integer], cluster: Cluster
) -> NDArray[np.int64]:
    """The order of standing copies by expert, then rank; raises unless a node has at most one instance of an expert."""
    given = f"{expert.dtype} {expert.shape} and {rank.dtype} {rank.shape}"
    if expert.ndim != 1 or expert.shape != rank.shape:
        raise InputError(f"standing copies need an expert and a rank each, not {given}")
    if not expert.size:
        return NONE
    if expert.dtype.kind not in "iu" or rank.dtype.kind not in "iu":
        raise InputError(f"experts and ranks of standing copies must be whole numbers, not {given}")
    if cluster.num_nodes == 1:
        raise InputError("standing copies level nodes, and there is one: leave them out, or name the nodes in cluster")
    for what, value, end in (("experts", expert, home_of_expert.size), ("ranks", rank, cluster.num_ranks)):
        if value.min() < 0 or value.max() >= end:
            raise InputError(f"{what} of standing copies must be 0 to {end - 1}, not {value.min()} to {value.max()}")
    nodes = np.concatenate([home_of_expert, rank]).astype(np.int64) // cluster.ranks_per_node
    instances = nodes * home_of_expert.size + np.concatenate([np.arange(home_of_expert.size), expert])
    if np.unique(instances).size != instances.size:
        raise InputError("a standing copy is on a node that has its expert already: leave it out")
    return np.lexsort((rank, expert))


class OneLayer:
    """A layer's homes and standing copies: what is checked and laid out once for many micro-batches."""

    def __init__(
        self, num_experts: int, *, cluster: Cluster, home_of_expert: NDArray[np.int32] | None = None,
        standing_expert: NDArray[np.integer] = NONE, standing_rank: NDArray[np.integer] = NONE, spare_slots: int = 2,
        tolerance: float = 0.005, min_tokens_per_copy: int = 0, hold_rows: int = 0, serve_rows: int = 0,
    ) -> None:  # fmt: skip
        """The parameters of `balance`."""
        check_whole("num_experts", num_experts, low=1)
        check_whole("spare_slots", spare_slots, low=0, high=None)
        check_whole("min_tokens_per_copy", min_tokens_per_copy, low=0, high=2**62 - 1)
        check_number("tolerance", tolerance, high=1000, below=True)
        for name, price in (("hold_rows", hold_rows), ("serve_rows", serve_rows)):
            check_whole(name, price, low=0, high=MOST_ROWS)
        self.cluster, self.num_experts = cluster, num_experts
        self.home_of_expert = _checked_homes(home_of_expert, num_experts, cluster)
        expert, rank = np.asarray(standing_expert), np.asarray(standing_rank)
        self._order = _checked_standing(expert, rank, self.home_of_expert, cluster)
        self._expert_C, self._rank_C = (one[self._order].astype(np.int64) for one in (expert, rank))
        self._slots = min(spare_slots, num_experts)  # more experts than there are cannot be copied
        self._costs = CopyCosts(tolerance, hold_rows, serve_rows, min_tokens_per_copy)
        self._scratch = scratch_for(cluster, self.home_of_expert, self._slots, self._expert_C, self._rank_C)

    def balance(self, tokens_ER: NDArray[np.integer]) -> Balanced:
        """Copies and split of one micro-batch."""
        tokens = _checked_tokens(np.asarray(tokens_ER), self.cluster)
        if len(tokens) != self.num_experts:
            raise InputError(f"tokens must be of {self.num_experts} experts, not of {len(tokens)}")
        return self.balance_checked(tokens)

    def balance_checked(self, tokens: NDArray[np.int32]) -> Balanced:
        """The same for C-contiguous tokens [experts, ranks] that are known to be right."""
        home, num_ranks = self.home_of_expert, self.cluster.num_ranks
        standing_CR = np.zeros((self._order.size, num_ranks), np.int32)
        found = balance_micro_batches(
            tokens[None, None], 0, self._scratch, self.cluster, self._slots, self._costs, NO_EXCHANGE,
            standing_CR[None],
        )  # fmt: skip
        copies, standing_tokens_CR = found.copies, np.empty_like(standing_CR)
        standing_tokens_CR[self._order] = standing_CR
        at_home = np.bincount(home, weights=tokens.sum(axis=1, dtype=np.int64), minlength=num_ranks)
        rank_load = at_home.astype(np.int64)
        for expert, rank, served in (
            (copies[EXPERT], copies[TARGET], copies[QUOTA]),
            (self._expert_C, self._rank_C, standing_CR.sum(axis=1, dtype=np.int64)),
        ):
            np.subtract.at(rank_load, home[expert], served)
            np.add.at(rank_load, rank, served)
        if self._order.size and rank_load.max() > at_home.max():
            # the slots of some node are too few to pass the tokens on
            alone = OneLayer(
                self.num_experts, cluster=self.cluster, home_of_expert=home, spare_slots=self._slots,
                tolerance=self._costs.tolerance, min_tokens_per_copy=self._costs.min_tokens,
                hold_rows=self._costs.hold, serve_rows=self._costs.serve,
            ).balance_checked(tokens)  # fmt: skip
            return replace(alone, standing_tokens_CR=np.zeros_like(standing_tokens_CR))
        return Balanced(
            expert_of_copy=copies[EXPERT].copy(), rank_of_copy=copies[TARGET].copy(),
            origin_of_copy=copies[ORIGIN].copy(), tokens_FR=found.tokens_FR.copy(),
            standing_tokens_CR=standing_tokens_CR, rank_load=rank_load,
        )  # fmt: skip


def _checked_homes(
    home_of_expert: NDArray[np.integer] | None, num_experts: int, cluster: Cluster
) -> NDArray[np.int32]:  # fmt: skip
    if home_of_expert is None:
        home_of_expert = contiguous(cluster, num_layers=1, num_experts=num_experts).home_of_expert[0]
    homes = np.asarray(home_of_expert)
    if homes.shape != (num_experts,) or not np.issubdtype(homes.dtype, np.integer):
        raise InputError(f"{num_experts} experts need as many homes, not {homes.dtype} {homes.shape}")
    if homes.min() < 0 or homes.max() >= cluster.num_ranks:
        raise InputError(f"homes must be ranks 0 to {cluster.num_ranks - 1}, not {homes.min()} to {homes.max()}")
    found: NDArray[np.int32] = np.asarray(homes, np.int32)
    return found


def balance(
    tokens_ER: NDArray[np.integer],
    *,
    cluster: Cluster,
    home_of_expert: NDArray[np.int32] | None = None,
    standing_expert: NDArray[np.integer] = NONE,
    standing_rank: NDArray[np.integer] = NONE,
    spare_slots: int = 2,
    tolerance: float = 0.005,
    min_tokens_per_copy: int = 0,
    hold_rows: int = 0,
    serve_rows: int = 0,
) -> Balanced:
    """Balance one layer of one micro-batch: tokens [experts, source ranks] in, copies and split out.

    Homes are contiguous unless given. standing_expert, standing_rank [C]: copies that are there already, at most one
    instance of an expert on a node; they level the nodes, and serve nothing where that would make the slowest rank
    slower. The fewest flash copies are made that bring every rank within the tolerance of the mean rank of the fullest
    node. hold_rows, serve_rows: cost of a copy, in rows, to the rank that holds it and to the one it comes from.

    `OneLayer` takes the same parameters once for many micro-batches.
    """
    tokens = _checked_tokens(np.asarray(tokens_ER), cluster)
    return OneLayer(
        len(tokens), cluster=cluster, home_of_expert=home_of_expert, standing_expert=standing_expert,
        standing_rank=standing_rank, spare_slots=spare_slots, tolerance=tolerance,
        min_tokens_per_copy=min_tokens_per_copy, hold_rows=hold_rows, serve_rows=serve_rows,
    ).balance_checked(tokens)  # fmt: skip
