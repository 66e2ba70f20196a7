"""A step: while it is planned, and with its plan."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import StepPlan
from equilibra.events.imbalance import imbalance, static_imbalance

__all__ = ["Prepared", "Step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A step whose counts are gathered and whose plan is made in the background."""

    load: StepLoad
    """of all ranks"""
    previous: Placement
    """homes that the plan begins with"""
    plan: Future[StepPlan]
    reused: bool = False
    """whether it is that of the step before, which had the same load"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A planned step."""

    plan: StepPlan
    """its micro-batches are those of all expert-parallel groups, one group after another"""
    load: StepLoad
    """what it was planned for"""
    reused: bool = False
    """whether the plan is that of the step before, which had the same load"""

    @property
    def static_imbalance(self) -> float:
        """Slowest over mean rank, with contiguous homes and without copies."""
        return static_imbalance(self.load)

    @property
    def planned_imbalance(self) -> float:
        """Slowest over mean rank under the plan."""
        return float(imbalance(self.plan.rank_load(self.load)).mean())
