"""Limits: what a plan may use. Declared and checked here, and shared by every setting that leads to a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from equilibra.core.checks import check_whole

__all__ = ["MOST_SLOTS", "CopyLimits", "PlanLimits"]

MOST_SLOTS = 2**16 - 1
"""copies or moves that can be asked for"""


@dataclass(frozen=True, kw_only=True)
class CopyLimits:
    """Copies and moves."""

    section: ClassVar[str] = ""
    """before the names of fields, in messages"""

    spare_slots: int = 2
    """flash copies a rank can hold at a time, from 0 on: one buffer shared by all layers"""
    standing_slots: int = 2
    """standing copies a node may hold per layer, from 0 on"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step (a migration budget); -1: as many as pay"""

    def __post_init__(self) -> None:
        for name, low in (("spare_slots", 0), ("standing_slots", 0), ("max_moves_per_layer", -1)):
            check_whole(f"{self.section}{name}", getattr(self, name), low=low, high=MOST_SLOTS)

    def limits(self, **changes: int) -> dict[str, Any]:
        """The limits as keyword arguments, some changed: `StepProblem(..., **setting.limits(standing_slots=0))`."""
        return {one.name: getattr(self, one.name) for one in fields(CopyLimits)} | changes


@dataclass(frozen=True, kw_only=True)
class PlanLimits(CopyLimits):
    """Everything that bounds or seeds a plan, but for what it is made of."""

    seed: int = 0
    """of every random choice of the planner, from 0 on"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(f"{self.section}seed", self.seed, low=0)

    def limits(self, **changes: int) -> dict[str, Any]:
        return super().limits(seed=self.seed) | changes
