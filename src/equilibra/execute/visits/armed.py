"""A plan that is being executed."""

from __future__ import annotations

from dataclasses import dataclass, field

from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.execute.visits.tables import Instances, instances_of

__all__ = ["Armed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Armed:
    """A plan with the load it was made for."""

    plan: StepPlan
    """the same on every rank"""
    load: StepLoad
    """counts of all ranks, which give all sizes"""
    micro_batches: list[int]
    """numbers of those that this expert-parallel group runs, in order"""
    late: frozenset[Stage] = frozenset()
    """stages whose flash copies would come late over one link"""
    _instances: dict[tuple[Stage, int, int], Instances] = field(default_factory=dict)

    def instances(self, stage: Stage, micro_batch: int, layer: int) -> Instances:
        """All instances of a layer and micro-batch, looked up once."""
        key = (stage, micro_batch, layer)
        if key not in self._instances:
            self._instances[key] = instances_of(self.plan, stage, layer, micro_batch)
        return self._instances[key]

    def after(self, stage: Stage, micro_batch: int) -> int | None:
        """The micro-batch that this group runs next with the same weights; None if there is none."""
        at = self.micro_batches.index(micro_batch) + 1
        if at == len(self.micro_batches):
            return None
        following, schedule = self.micro_batches[at], self.plan.schedule
        mini = None if schedule is None else schedule.mini_batch_of_micro_batch
        if stage is Stage.UPDATE and mini is not None and mini[following] != mini[micro_batch]:
            return None  # the optimizer comes between
        return following
