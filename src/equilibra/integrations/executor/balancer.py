"""The part of a balancer that all frameworks share: process groups, a step's load, its plan, and visits in slots.

Symbols: M micro-batches, L MoE layers, T tokens of this rank, K experts per token, E experts, R ranks, G groups.

A step's routing is [M][L] ids [T, K]. Rows with a negative id or a repeated expert are routed live and not counted.
Ranks exchange counts; the ids stay on their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad, imbalance, static_imbalance
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import StepPlan
from equilibra.core.visit import Stage, Visit, VisitKey
from equilibra.execute.group import Channel, ExpertGroup, new_group, watch_over
from equilibra.integrations.executor.visits import LayerVisits
from equilibra.integrations.executor.warming import warm_up
from equilibra.integrations.planned import HomeSlots, PlanSetting, SlotCounts, SlotTable, contiguous_slots, slot_table
from equilibra.plan.planner import StepProblem

__all__ = ["LazyRouting", "Routing", "Step", "VisitBalancer", "count_routing", "counts_of_world", "stage_group"]

Routing = Sequence[Sequence[Tensor]]


class LazyRouting(Sequence[Sequence[Tensor]]):
    """Routing made on access from a framework's micro-batches: int64 ids of all of them would take gigabytes."""

    def __init__(self, micro_batches: Sequence[Any], routing_of: Callable[[Any], Sequence[Tensor]]) -> None:
        self.micro_batches, self.routing_of = micro_batches, routing_of

    def __len__(self) -> int:
        return len(self.micro_batches)

    @overload
    def __getitem__(self, number: int) -> Sequence[Tensor]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sequence[Tensor]]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return LazyRouting(self.micro_batches[number], self.routing_of)
        return self.routing_of(self.micro_batches[number])


def counts_of_world(count: int) -> list[int]:
    """Collective over the world: the count that each process passed."""
    every: list[Any] = [count]
    if dist.get_world_size() > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, count)
    return every


def stage_group(
    expert_parallel: dist.ProcessGroup, expert_data_parallel: dist.ProcessGroup, cluster: Cluster, timeout_s: float
) -> ExpertGroup:
    """Collective over the world: the ranks of this pipeline stage as an `ExpertGroup`.

    Tokens use the framework's expert-parallel group. Flash copies and their gradients each get a group of the ranks of
    a node, standing copies and homes one of the same ranks as the tokens, so that none waits for another. Counts and
    hashes use a gloo group of the whole stage.
    """
    rank, index = expert_parallel.rank(), expert_data_parallel.rank()
    num_groups = expert_data_parallel.size()
    if cluster.num_ranks * num_groups == 1 and dist.get_world_size() == 1:
        return ExpertGroup(cluster=cluster, timeout_s=timeout_s, channels={})
    mine, across = dist.get_process_group_ranks(expert_parallel), list[Any]([None] * num_groups)
    dist.all_gather_object(across, mine, group=expert_data_parallel)
    control = _new_group(sorted(rank for part in across for rank in part), timeout_s, backend="gloo")
    first = rank - rank % cluster.ranks_per_node
    of_node = mine[first : first + cluster.ranks_per_node]
    channels = {Channel.DISPATCH: expert_parallel, Channel.CONTROL: control, Channel.REPLICAS: expert_data_parallel}
    for channel, ranks in ((Channel.STANDING, mine), (Channel.COPIES, of_node), (Channel.GRADIENTS, of_node)):
        channels[channel] = _new_group(ranks, timeout_s, backend=None)
    group = ExpertGroup(
        cluster=cluster, rank=rank, index=index, num_groups=num_groups, timeout_s=timeout_s, channels=channels,
        watch=watch_over(channels, timeout_s),
    )  # fmt: skip
    places = np.concatenate(group.gather(np.array([[rank, index]]), what="joining the ranks of a pipeline stage"))
    if control.size() != group.world_size or not np.array_equal(
        places, [[at % cluster.num_ranks, at // cluster.num_ranks] for at in range(group.world_size)]
    ):
        raise InputError(
            f"ranks of a pipeline stage have (expert rank, expert data rank) {places.tolist()}: the expert rank must "
            "vary fastest, as in the order tp-cp-ep-dp-pp, and expert_tensor_parallel_size must be 1"
        )
    return group


def _new_group(mine: list[int], timeout_s: float, *, backend: str | None) -> dist.ProcessGroup:
    """A group of these ranks. torch requires every process to create every group, so all exchange their ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(mine))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        part: new_group(list(part), timeout_s, backend=backend) for part in sorted(set(every))
    }
    return made[tuple(mine)]


def count_routing(routing: Routing, *, num_layers: int, num_experts: int, top_k: int) -> NDArray[np.int32]:
    """[M, L, E] (token, expert) pairs of this rank; raises if the routing does not fit the model."""
    counts = np.zeros((len(routing), num_layers, num_experts), np.int32)
    for m, layers in enumerate(routing):
        if len(layers) != num_layers:
            raise InputError(
                f"micro-batch {m} has routing of {len(layers)} layers, this pipeline stage has {num_layers} MoE layers"
            )
        for layer, ids in enumerate(layers):
            if ids.ndim != 2 or ids.shape[1] != top_k or ids.is_floating_point():
                raise InputError(
                    f"routing of micro-batch {m}, layer {layer} must be whole numbers [tokens, {top_k}], not "
                    f"{ids.dtype} {list(ids.shape)}"
                )
        if num_layers:
            counted = torch.stack([_count(ids.detach().long(), num_experts) for ids in layers]).cpu().numpy()
            if counted[:, -1].max() >= num_experts:
                raise InputError(f"routing names expert {counted[:, -1].max()}, the model has {num_experts}")
            counts[m] = counted[:, :num_experts]
    return counts


def _count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """[E + 2]: pairs of each expert, pairs in rows routed live, the largest id."""
    ordered = ids_TK.sort(dim=1).values
    live = (ordered[:, :1] < 0).any(dim=1) | (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    at = ids_TK.masked_fill(live[:, None], num_experts).clamp(0, num_experts).flatten()
    counts = at.new_zeros(num_experts + 2).scatter_add_(0, at, torch.ones_like(at))
    counts[-1] = ids_TK.amax() if ids_TK.numel() else -1
    return counts


Layer = TypeVar("Layer", bound=LayerVisits)
Setting = TypeVar("Setting", bound=PlanSetting)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A planned step."""

    plan: StepPlan
    """covers the micro-batches of all expert-parallel groups, one group after another"""
    load: StepLoad
    """the load it was planned for"""
    reused: bool = False
    """whether the plan is the previous step's, which had the same load"""

    @property
    def static_imbalance(self) -> float:
        """Slowest over mean rank with contiguous homes and no copies."""
        return static_imbalance(self.load)

    @property
    def planned_imbalance(self) -> float:
        """Slowest over mean rank under the plan."""
        return float(imbalance(self.plan.rank_load(self.load)).mean())


class VisitBalancer(Generic[Layer, Setting]):
    """Plans steps and arms layers; one per rank, for the layers of its pipeline stage."""

    def __init__(
        self, group: ExpertGroup, setting: Setting, layers: Sequence[Layer], model: MoEModel, counts: SlotCounts
    ) -> None:
        """model: the layers' shapes, for prices; at least one layer even if the pipeline stage has none."""
        self.group, self.setting, self.layers, self.model, self.counts = group, setting, layers, model, counts
        self.planner = setting.chosen_planner
        self.slots = self._contiguous_slots()
        self._rates = setting.rates_of(model, num_nodes=group.cluster.num_nodes)
        self._warm_up = None if self.planner.name == "static" else warm_up(group.cluster.num_nodes)

    @property
    def placement(self) -> Placement:
        """Current homes."""
        return self.slots.placement

    def _contiguous_slots(self) -> HomeSlots:
        model = self.model
        return contiguous_slots(self.group.cluster, num_layers=model.num_layers, num_experts=model.num_experts)

    def _load(self, routing: Routing) -> StepLoad:
        """Collective: the load of all ranks, one group's micro-batches after another's.

        A dense pipeline stage plans one layer without tokens.
        """
        group, num_layers, num_experts = self.group, len(self.layers), self.model.num_experts
        counts: list[NDArray[np.int32]] = []

        def count() -> None:
            counts.append(
                count_routing(routing, num_layers=num_layers, num_experts=num_experts, top_k=self.model.top_k)
            )
            if not num_layers:
                counts[0] = np.zeros((max(1, len(routing)), 1, num_experts), np.int32)
            elif not len(routing):
                raise InputError("there is nothing to plan: routing has no micro-batches")

        group.all_succeed(count, what="comparing routing with the model")
        group.agree(f"{len(routing)}", what="the number of micro-batches")
        every = np.stack(group.gather(counts[0], what="gathering counts of routing"))
        tokens_GMLER = every.reshape(group.num_groups, group.num_ranks, *counts[0].shape).transpose(0, 2, 3, 4, 1)
        return StepLoad(tokens_MLER=np.ascontiguousarray(tokens_GMLER.reshape(-1, *tokens_GMLER.shape[2:]), np.int32))

    def _plan(self, load: StepLoad, previous: Placement, *, max_moves_per_layer: int = 0) -> StepPlan:
        limits = self.setting.limits(
            max_moves_per_layer=max_moves_per_layer, standing_slots=self.counts.standing, spare_slots=self.counts.flash
        )
        problem = StepProblem(
            cluster=self.group.cluster, given_load=load, previous=previous, rates=self._rates, **limits
        )
        if self._warm_up is not None:
            self._warm_up.wait()
        plan = self.planner.plan(problem)
        plan.check(load, spare_slots=self.counts.flash, standing_slots=self.counts.standing)
        return plan

    def _micro_batches(self, step: Step) -> range:
        """Those of this group."""
        num = step.plan.num_micro_batches // self.group.num_groups
        return range(self.group.index * num, (self.group.index + 1) * num)

    def _arm(self, step: Step, stage: Stage, *, start: int = 0) -> None:
        """Give each layer the visits of this group's micro-batches, in order."""
        for layer in self.layers:
            keys = [VisitKey(stage, m, layer.layer) for m in self._micro_batches(step)[start:]]
            layer.arm([partial(self._visit, step.plan, key) for key in keys])

    def _visit(self, plan: StepPlan, key: VisitKey) -> SlotTable:
        return self._in_slots(plan.visit(*key))

    def _in_slots(self, visit: Visit, *, scale: int = 0) -> SlotTable:
        expert_of_slot, group = self.slots.expert_of_slot[visit.key.layer], self.group
        return slot_table(visit, expert_of_slot, self.counts, group.rank, group.ranks_of_node, scale)
