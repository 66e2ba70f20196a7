"""Cluster and placement: the ranks of an expert-parallel group, and the home of every expert on them, per layer.

Symbols: L layers, E experts, R ranks. The home of every expert is the canonical map; every other map is derived from
it. Expert numbers are logical, as in the checkpoint, whatever the placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The expert-parallel group: rank r is on node r // ranks_per_node; slow links connect the nodes."""

    num_nodes: int = 1
    ranks_per_node: int = 8
    """ranks that share fast links"""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            check_whole(name, getattr(self, name), low=1, high=65_536)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of_rank(self) -> NDArray[np.int64]:
        return np.arange(self.num_ranks) // self.ranks_per_node

    def experts_per_rank(self, num_experts: int) -> int:
        """Home experts of each rank when `num_experts` are spread evenly; InputError if they cannot be."""
        if num_experts < 1 or num_experts % self.num_ranks:
            raise InputError(
                f"cannot give {num_experts} experts equal homes on {self.num_ranks} ranks "
                f"({self.num_nodes} nodes x {self.ranks_per_node}): experts must be a multiple of ranks; "
                f"use a number of ranks that divides {num_experts}"
            )
        return num_experts // self.num_ranks


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The rank that owns each expert's weights, optimizer state and checkpoint shard during a step."""

    home_of_expert: NDArray[np.int32]
    """[L, E] home rank of each expert of each layer"""
    cluster: Cluster

    def __post_init__(self) -> None:
        home, num_ranks = self.home_of_expert, self.cluster.num_ranks
        if home.ndim != 2 or 0 in home.shape or home.dtype != np.int32:
            raise InputError(f"homes must be int32 [layers, experts], not {home.dtype} {home.shape}")
        if home.min() < 0 or home.max() >= num_ranks:
            raise InputError(f"homes must be ranks 0 to {num_ranks - 1}, not {home.min()} to {home.max()}")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.cluster == other.cluster
            and np.array_equal(self.home_of_expert, other.home_of_expert)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, never used as a key

    @property
    def num_layers(self) -> int:
        return int(self.home_of_expert.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.home_of_expert.shape[1])

    def num_homes(self) -> NDArray[np.int64]:
        """[L, R] number of experts whose home is each rank."""
        num_ranks = self.cluster.num_ranks
        entry = np.arange(self.num_layers)[:, None] * num_ranks + self.home_of_expert
        return np.bincount(entry.ravel(), minlength=self.num_layers * num_ranks).reshape(-1, num_ranks)

    def homes_on(self, layer: int, rank: int) -> NDArray[np.int32]:
        return np.flatnonzero(self.home_of_expert[layer] == rank).astype(np.int32)

    def is_even(self) -> bool:
        """Whether every rank is home to the same number of experts, as in plain expert parallelism."""
        homes = self.num_homes()
        return bool((homes == homes.flat[0]).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Migration:
    """The experts whose home changes from one placement to the next."""

    before: Placement
    after: Placement

    def __post_init__(self) -> None:
        a, b = self.before, self.after
        if a.cluster != b.cluster or a.home_of_expert.shape != b.home_of_expert.shape:
            raise InputError(
                f"cannot migrate from homes {a.home_of_expert.shape} on {a.cluster} "
                f"to {b.home_of_expert.shape} on {b.cluster}: layers, experts and cluster must be the same"
            )

    def moves(self) -> NDArray[np.int32]:
        """[moves, 4] sorted rows of (layer, expert, source rank, target rank)."""
        layer, expert = np.nonzero(self.before.home_of_expert != self.after.home_of_expert)
        source = self.before.home_of_expert[layer, expert]
        target = self.after.home_of_expert[layer, expert]
        return np.stack([layer, expert, source, target], axis=1).astype(np.int32)

    @property
    def num_moves(self) -> int:
        return int(np.count_nonzero(self.before.home_of_expert != self.after.home_of_expert))


def contiguous(cluster: Cluster, *, num_layers: int, num_experts: int) -> Placement:
    """The placement of plain expert parallelism: rank r is home to experts r*E/R to (r+1)*E/R - 1."""
    home = np.arange(num_experts, dtype=np.int32) // cluster.experts_per_rank(num_experts)
    return Placement(home_of_expert=np.tile(home.astype(np.int32), (num_layers, 1)), cluster=cluster)
