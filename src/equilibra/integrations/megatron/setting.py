"""How steps are planned under Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from equilibra.core.errors import InputError
from equilibra.cost.rates import Rates
from equilibra.plan.planner import Planner

__all__ = ["MegatronSetting"]


@dataclass(frozen=True, kw_only=True)
class MegatronSetting:
    """How steps are planned. The same on every rank."""

    planner: str | Planner = "equilibra"
    """"static" switches balancing off"""
    spare_slots: int = 2
    """copies a rank can hold at a time, in a layer"""
    ranks_per_node: int | None = None
    """ranks of the expert-parallel group that share fast links; None: 8, or all if there are fewer"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step, -1: as many as pay; without an optimizer none do"""
    prefetch: bool = True
    """whether copies travel while the layer before computes, for the memory of up to two more layers of copies"""
    rates: Rates | None = None
    """what rows, copies and moves cost; None: the model's experts on an H200"""
    timeout_s: float = 300.0
    """after which a silent rank is lost, in exchanges of counts and hashes"""
    seed: int = 0
    """of every random choice of the planner"""

    def __post_init__(self) -> None:
        if not isinstance(self.spare_slots, int) or not 0 <= self.spare_slots < 2**16:
            raise InputError(f"spare_slots must be a whole number from 0 to 65535, not {self.spare_slots!r}")
