"""Static: homes stay where they are, nothing is copied. What plain expert parallelism does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equilibra.core.plan import StepPlan
from equilibra.plan.baselines.assemble import no_flash_copies, step_plan
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["Static"]


@dataclass(frozen=True, kw_only=True)
class Static:
    """Contiguous homes, or those of the previous placement."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "static"
    """in the registry and in plans"""

    def plan(self, problem: StepProblem) -> StepPlan:
        """Change nothing."""
        return step_plan(problem, self.name, no_flash_copies(problem))
