"""How steps are planned inside another framework, and on which cluster."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import isfinite

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.cost.rates import Rates
from equilibra.plan.planner import Planner, planner_named

__all__ = ["MegatronSetting", "PlanSetting", "cluster_of"]

RANKS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """The same on every rank."""

    planner: str | Planner = "equilibra"
    """"static" switches balancing off: recorded experts are replayed, nothing is copied"""
    spare_slots: int = 2
    """copies a rank can hold at a time, in a layer"""
    ranks_per_node: int | None = None
    """ranks of the expert-parallel group that share fast links; None: 8, or all if there are fewer"""
    rates: Rates | None = None
    """what rows, copies and moves cost; None: the model's experts on an H200"""
    timeout_s: float = 300.0
    """after which a silent rank is lost, in exchanges of counts, hashes and copies"""
    seed: int = 0
    """of every random choice of the planner"""

    def __post_init__(self) -> None:
        self._check_whole("spare_slots", 0, 2**16 - 1)
        self._check_whole("seed", 0, 2**31 - 1)
        if self.ranks_per_node is not None:
            self._check_whole("ranks_per_node", 1, 2**16 - 1)
        timeout = self.timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not isfinite(timeout):
            raise InputError(f"timeout_s must be a number of seconds, not {timeout!r}")
        if not 0 < timeout < 10**6:
            raise InputError(f"timeout_s must be above 0 and below a million seconds, not {timeout}")
        if isinstance(self.planner, str):
            planner_named(self.planner)
        elif not hasattr(self.planner, "plan"):
            raise InputError(f"planner must be a name or a Planner, not {self.planner!r}")

    def _check_whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(f"{name} must be a whole number from {least} to {most}, not {value!r}")

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{self.chosen_planner.name}, {self.spare_slots} spare slots, nodes of {cluster.ranks_per_node}, "
            f"seed {self.seed}, {sha256(repr(self.rates).encode()).hexdigest()}"
        )

    @property
    def chosen_planner(self) -> Planner:
        """The planner, also where it was named."""
        return planner_named(self.planner) if isinstance(self.planner, str) else self.planner


def cluster_of(num_ranks: int, ranks_per_node: int | None) -> Cluster:
    """Nodes of expert-parallel ranks."""
    per_node = min(RANKS_PER_NODE, num_ranks) if ranks_per_node is None else ranks_per_node
    if num_ranks % per_node:
        raise InputError(f"{num_ranks} expert-parallel ranks cannot be nodes of {per_node}: set ranks_per_node")
    return Cluster(num_nodes=num_ranks // per_node, ranks_per_node=per_node)


@dataclass(frozen=True, kw_only=True)
class MegatronSetting(PlanSetting):
    """The same on every rank."""

    max_moves_per_layer: int = -1
    """homes that may move per layer and step, -1: as many as pay; without an optimizer none do"""
    prefetch: bool = True
    """whether copies travel while the layer before computes, for the memory of up to two more layers of copies"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("max_moves_per_layer", -1, 2**16 - 1)
        if not isinstance(self.prefetch, bool):
            raise InputError(f"prefetch must be True or False, not {self.prefetch!r}")

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{super().description(cluster)}, {self.max_moves_per_layer} moves, "
            f"copies fetched {'ahead' if self.prefetch else 'when used'}"
        )
