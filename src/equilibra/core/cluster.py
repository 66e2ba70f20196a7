"""The expert-parallel group. Ranks of one node share fast links; nodes are connected by slow ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError

__all__ = ["Cluster"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `ranks_per_node` ranks; rank r is on node r // ranks_per_node."""

    num_nodes: int = 1
    """nodes of the expert-parallel group"""
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
