"""What the balancers of all frameworks do: load of a step's routing, plan, visits in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Placement
from equilibra.core.plan import StepPlan
from equilibra.core.visit import Stage, Visit, VisitKey
from equilibra.events.imbalance import imbalance, static_imbalance
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.executor.counts import Routing, gather_load
from equilibra.integrations.executor.visits import LayerVisits
from equilibra.integrations.planned.setting import PlanSetting
from equilibra.integrations.planned.slots import HomeSlots, SlotTable, contiguous_slots, slot_table
from equilibra.plan.planner import StepProblem

__all__ = ["Step", "VisitBalancer"]

Layer = TypeVar("Layer", bound=LayerVisits)
Setting = TypeVar("Setting", bound=PlanSetting)


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


class VisitBalancer(Generic[Layer, Setting]):
    """Plans steps and arms layers; one per rank, for the layers of its pipeline stage."""

    def __init__(self, group: ExpertGroup, setting: Setting, layers: Sequence[Layer], model: MoEModel) -> None:
        """model: shapes, for prices; it has at least one layer, also where a pipeline stage has none."""
        self.group, self.setting, self.layers, self.model = group, setting, layers, model
        self.planner = setting.chosen_planner
        self.slots = self._contiguous_slots()
        self._rates = setting.rates_of(model, num_nodes=group.cluster.num_nodes)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.model.num_experts

    @property
    def placement(self) -> Placement:
        """Homes now."""
        return self.slots.placement

    def _contiguous_slots(self) -> HomeSlots:
        model = self.model
        return contiguous_slots(self.group.cluster, num_layers=model.num_layers, num_experts=model.num_experts)

    def _load(self, routing: Routing) -> StepLoad:
        """Collective: the load of all ranks."""
        model = self.model
        return gather_load(
            self.group, routing, num_layers=len(self.layers), num_experts=model.num_experts, top_k=model.top_k
        )

    def _plan(self, load: StepLoad, previous: Placement, *, max_moves_per_layer: int = 0) -> StepPlan:
        """The same on every rank of the stage."""
        setting = self.setting
        problem = StepProblem(
            cluster=self.group.cluster, given_load=load, previous=previous, rates=self._rates,
            **setting.limits(max_moves_per_layer=max_moves_per_layer),
        )  # fmt: skip
        plan = self.planner.plan(problem)
        plan.check(load, spare_slots=setting.spare_slots, standing_slots=0)
        return plan

    def _arm(self, step: Step, stage: Stage, *, start: int = 0) -> None:
        """Give every layer its visits: of this group's micro-batches, in order."""
        num = step.plan.num_micro_batches // self.group.num_groups
        first = self.group.index * num
        for layer in self.layers:
            keys = [VisitKey(stage, first + m, layer.layer) for m in range(start, num)]
            layer.arm([partial(self._visit, step.plan, key) for key in keys])

    def _visit(self, plan: StepPlan, key: VisitKey) -> SlotTable:
        return self._in_slots(plan.visit(*key))

    def _in_slots(self, visit: Visit) -> SlotTable:
        expert_of_slot = self.slots.expert_of_slot[visit.key.layer]
        return slot_table(visit, expert_of_slot, self.setting.spare_slots, self.group.rank)
