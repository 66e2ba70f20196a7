"""How steps are planned under Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equilibra.core.checks import check_flag
from equilibra.integrations.planned.setting import PlanSetting

__all__ = ["MegatronSetting"]


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
