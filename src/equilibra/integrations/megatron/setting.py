"""How steps are planned under Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.integrations.planned.setting import PlanSetting

__all__ = ["MegatronSetting"]


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
