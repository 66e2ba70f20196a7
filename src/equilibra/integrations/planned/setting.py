"""How steps are planned inside another framework, and on which cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equilibra.core.checks import check_flag, check_number, check_whole
from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.plan.setting import PlannerSetting

__all__ = ["MegatronSetting", "PlanSetting", "cluster_of"]

RANKS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class PlanSetting(PlannerSetting):
    """The same on every rank."""

    standing_slots: int = 0
    """no copy stays for a whole step: must be 0"""
    max_moves_per_layer: int = 0
    """homes stay where the framework has them: must be 0 where it cannot move them"""
    ranks_per_node: int | None = None
    """ranks of the expert-parallel group that share fast links; None: 8, or all if there are fewer"""
    timeout_s: float = 300.0
    """after which a silent rank is lost, in exchanges of counts, hashes and copies"""

    homes_move: ClassVar[bool] = False
    """whether the framework can move them"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("standing_slots",) if self.homes_move else ("standing_slots", "max_moves_per_layer"):
            if getattr(self, name):
                raise InputError(f"{self.section}{name} must be 0 inside this framework, not {getattr(self, name)}")
        if self.ranks_per_node is not None:
            check_whole(f"{self.section}ranks_per_node", self.ranks_per_node, low=1, high=2**16 - 1)
        check_number(f"{self.section}timeout_s", self.timeout_s, above=0, high=1e6, below=True)

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{self.chosen_planner.name}, {self.spare_slots} spare slots, nodes of {cluster.ranks_per_node}, "
            f"seed {self.seed}, {self.prices_hash()}"
        )


def cluster_of(num_ranks: int, ranks_per_node: int | None) -> Cluster:
    """Nodes of expert-parallel ranks."""
    per_node = min(RANKS_PER_NODE, num_ranks) if ranks_per_node is None else ranks_per_node
    if num_ranks % per_node:
        raise InputError(f"{num_ranks} expert-parallel ranks cannot be nodes of {per_node}: set ranks_per_node")
    return Cluster(num_nodes=num_ranks // per_node, ranks_per_node=per_node)


@dataclass(frozen=True, kw_only=True)
class MegatronSetting(PlanSetting):
    """The same on every rank."""

    homes_move: ClassVar[bool] = True

    max_moves_per_layer: int = -1
    """homes that may move per layer and step, -1: as many as pay; without an optimizer none do"""
    prefetch: bool = True
    """whether copies travel while the layer before computes, for the memory of up to two more layers of copies"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(f"{self.section}prefetch", self.prefetch)

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{super().description(cluster)}, {self.max_moves_per_layer} moves, "
            f"copies fetched {'ahead' if self.prefetch else 'when used'}"
        )
