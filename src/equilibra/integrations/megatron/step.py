"""What a step is under Megatron: how it is planned, while it is planned, and with its plan."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates
from equilibra.measure.imbalance import imbalance
from equilibra.plan.planner import Planner

__all__ = ["MegatronSetting", "Prepared", "Step"]


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
        """Slowest over mean rank, as plain Megatron would have it."""
        load_MLE = self.load.expert_load()
        return float(imbalance(load_MLE.reshape(*load_MLE.shape[:2], self.load.num_ranks, -1).sum(axis=3)).mean())

    @property
    def planned_imbalance(self) -> float:
        """Slowest over mean rank under the plan."""
        return float(imbalance(self.plan.rank_load(self.load)).mean())
