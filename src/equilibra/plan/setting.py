"""How a run plans its steps: planner, limits and prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from equilibra.core.checks import PlanLimits, check_text
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.presets import AUTO, prices_of
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.planner import Planner, planner_named

__all__ = ["PlannerSetting"]


@dataclass(frozen=True, kw_only=True)
class PlannerSetting(PlanLimits):
    """Planner, limits and prices; must be the same on every rank."""

    planner: str | Planner = "equilibra"
    """planner or its name; "static" disables balancing: contiguous homes, no copies"""
    hardware: str | Prices = AUTO
    """prices: a preset, a file written by `equilibra doctor` or `calibrate`, or auto: the GPU's preset; for an unknown
    device an H200's with copies that cost no more than their rows"""
    rates: Rates | None = None
    """costs of rows, copies and moves that override those derived from the hardware"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.planner, str):
            planner_named(self.planner)
        elif not hasattr(self.planner, "plan"):
            raise InputError(f"planner must be a name or a Planner, not {self.planner!r}")
        if not isinstance(self.hardware, Prices):
            check_text(f"{self.section}hardware", self.hardware)

    @property
    def chosen_planner(self) -> Planner:
        return planner_named(self.planner) if isinstance(self.planner, str) else self.planner

    def on(self, device_name: str | None) -> Self:
        """The setting with auto resolved for a device name as the driver reports it (None: no GPU)."""
        return self if self.rates else replace(self, hardware=prices_of(self.hardware, device_name))

    def prices_hash(self) -> str:
        """Hash of the prices, which ranks compare."""
        return sha256(repr(self.rates or prices_of(self.hardware)).encode()).hexdigest()

    def rates_of(self, model: MoEModel, *, num_nodes: int) -> Rates:
        """The planner's rates for a model."""
        return self.rates or rates_for(model, prices_of(self.hardware), num_nodes=num_nodes)
