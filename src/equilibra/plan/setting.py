"""How steps are planned, wherever they run: who plans, within which limits, and at which prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from equilibra.core.checks import check_text
from equilibra.core.errors import InputError
from equilibra.core.limits import PlanLimits
from equilibra.core.model import MoEModel
from equilibra.cost.files import AUTO, prices_of
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.planner import Planner, planner_named

__all__ = ["PlannerSetting"]


@dataclass(frozen=True, kw_only=True)
class PlannerSetting(PlanLimits):
    """The same on every rank."""

    planner: str | Planner = "equilibra"
    """who plans; "static" switches balancing off: contiguous homes, no copies"""
    hardware: str | Prices = AUTO
    """prices of rows, copies and links: a preset by name, a file that `equilibra doctor` or `calibrate` wrote, or auto:
    the preset of the GPU; without a GPU that is known an H200's, by which copies cost no more than their rows"""
    rates: Rates | None = None
    """what rows, copies and moves of the model cost, if that is known better than from the hardware"""

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
        """The planner, also where it was named."""
        return planner_named(self.planner) if isinstance(self.planner, str) else self.planner

    def on(self, device_name: str | None) -> Self:
        """The same on a device, by the name its driver gives it (None: no GPU): auto becomes that device's prices."""
        return self if self.rates else replace(self, hardware=prices_of(self.hardware, device_name))

    def prices_hash(self) -> str:
        """Of what plans are made for: ranks compare it."""
        return sha256(repr(self.rates or prices_of(self.hardware)).encode()).hexdigest()

    def rates_of(self, model: MoEModel, *, num_nodes: int) -> Rates:
        """What the planner weighs for a model."""
        return self.rates or rates_for(model, prices_of(self.hardware), num_nodes=num_nodes)
