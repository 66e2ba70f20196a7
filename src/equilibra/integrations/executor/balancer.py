"""The part of a balancer that all frameworks share: process groups, a step's load, its plan, and visits in slots.

Symbols: M micro-batches, L MoE layers, T tokens of this rank, K experts per token, E experts, R ranks, G groups.

A step's routing is [M][L] ids [T, K]. Rows with a negative id or a repeated expert are routed live and not counted.
Ranks exchange counts; the ids stay on their rank.

Each layer takes its visits in the order of micro-batches. Forward passes take visits in order; so do forwards that
backward repeats (activation recompute), with a count of their own. Frameworks with micro-batches in flight (1F1B,
interleaved) repeat them in order. Elsewhere only the last forward may be repeated, since the order of several would be
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.load import StepLoad, imbalance, static_imbalance
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import StepPlan
from equilibra.core.visit import Stage, Visit, VisitKey
from equilibra.events.schema import Direction
from equilibra.execute.group import Channel, ExpertGroup, new_group, watch_over
from equilibra.execute.record import direction_now
from equilibra.integrations.executor.warming import warm_up
from equilibra.integrations.planned import HomeSlots, PlanSetting, SlotCounts, SlotTable, contiguous_slots, slot_table
from equilibra.plan.planner import StepProblem

T = TypeVar("T")


class LayerVisits:
    """The armed visits of one layer."""

    def __init__(self, layer: int, group: ExpertGroup, *, num_homes: int, in_flight: bool) -> None:
        self.layer, self.group, self.num_homes = layer, group, num_homes
        self.in_flight = in_flight
        """whether several micro-batches may be between forward and backward"""
        self.current: SlotTable | None = None
        """the visit of the running forward; None: no step is armed"""
        self.number = -1
        """index of that visit among the armed ones"""
        self._visits: Sequence[Callable[[], SlotTable]] | None = None
        self._made: dict[int, SlotTable] = {}
        self._begun = dict.fromkeys((Direction.FORWARD, Direction.FORWARD_AGAIN, Direction.BACKWARD), 0)

    def arm(self, visits: Sequence[Callable[[], SlotTable]] | None) -> None:
        """Take the visits of a step, in order; None disarms."""
        self._visits, self._made, self.current, self.number = visits, {}, None, -1
        self._begun = dict.fromkeys(self._begun, 0)

    @property
    def num_done(self) -> int:
        """Forward passes since the step was armed."""
        return 0 if self._visits is None else self._begun[Direction.FORWARD]

    def take(self) -> SlotTable | None:
        """The visit of the forward that begins now; None if no step is armed."""
        direction, begun = direction_now(), self._begun[Direction.FORWARD]
        number, again = self._begun[direction], direction is Direction.FORWARD_AGAIN
        if self._visits is None:
            if again and not begun and not self.in_flight:
                raise ExecuteError(
                    f"activations of MoE layer {self.layer} are recomputed for a planned pass after its end(): call "
                    "end() after backward"
                )
        elif again and not self.in_flight and number != begun - 1:
            raise ExecuteError(
                f"activations of MoE layer {self.layer} are recomputed for micro-batch {number + 1} when {begun} have "
                "begun: with activation checkpointing, run backward of each micro-batch once before the next forward"
            )
        elif number >= (begun if again else len(self._visits)):
            raise ExecuteError(
                f"{'recompute' if again else 'forward'} {number + 1} of MoE layer {self.layer} has no plan: the step "
                f"has {len(self._visits)} micro-batches, {begun} have begun; pass all of them to begin(), arm() the "
                "step again for another pass, or end() it before unplanned passes"
            )
        self._begun[direction] += 1
        self.number = number
        return self._visit(number)

    def _visit(self, number: int) -> SlotTable | None:
        """An armed visit, made on first use; None if there is none."""
        if self._visits is None or number >= len(self._visits):
            return None
        if number not in self._made:
            self._made[number] = self._visits[number]()
        return self._made[number]


class Routing(Protocol):
    """Ids [T, K] of a step, by micro-batch and MoE layer; lists of lists are the simplest."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence[Tensor]]: ...


@dataclass(frozen=True)
class LazyRouting:
    """Routing made on access from a framework's micro-batches: int64 ids of all of them would take gigabytes."""

    micro_batches: Sequence[Any]
    routing_of: Callable[[Any], Sequence[Tensor]]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        return map(self.routing_of, self.micro_batches)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective: what each process of the group, or of the world, passed."""
    every: list[Any] = [value] * dist.get_world_size(group)
    if len(every) > 1:
        dist.all_gather_object(every, value, group=group)
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
    mine = dist.get_process_group_ranks(expert_parallel)
    across = gather_objects(mine, expert_data_parallel)
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
    groups = sorted(set(gather_objects(tuple(mine))))
    return {part: new_group(list(part), timeout_s, backend=backend) for part in groups}[tuple(mine)]


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


def routed_live(ids_TK: Tensor) -> Tensor:
    """[T] rows with a negative id or a repeated expert, which are no recorded routing."""
    ordered = ids_TK.sort(dim=1).values
    return (ordered[:, :1] < 0).any(dim=1) | (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)


def _count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """[E + 2]: pairs of each expert, pairs in rows routed live, the largest id."""
    at = ids_TK.masked_fill(routed_live(ids_TK)[:, None], num_experts).clamp(0, num_experts).flatten()
    counts = at.new_zeros(num_experts + 2).scatter_add_(0, at, torch.ones_like(at))
    counts[-1] = ids_TK.amax() if ids_TK.numel() else -1
    return counts


def gather_counts(group: ExpertGroup, counts_MLE: NDArray[np.int32], *, what: str) -> NDArray[np.int32]:
    """Collective: [M, L, E, R] counts of all ranks, one expert-parallel group's micro-batches after another's.

    Micro-batches that some rank of a group lacks, because its pass was cut off, are left out.
    """
    every, num = group.gather(counts_MLE, what=what), group.num_ranks
    groups = [every[at : at + num] for at in range(0, len(every), num)]
    of_groups = [np.stack([one[: min(map(len, of_group))] for one in of_group], axis=3) for of_group in groups]
    return np.ascontiguousarray(np.concatenate(of_groups), np.int32)


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
    """Plans steps and arms the layers of this rank's pipeline stage."""

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
        return self.slots.placement

    def _contiguous_slots(self) -> HomeSlots:
        model = self.model
        return contiguous_slots(self.group.cluster, num_layers=model.num_layers, num_experts=model.num_experts)

    def _load(self, routing: Routing) -> StepLoad:
        """Collective: the load of all ranks, one group's micro-batches after another's.

        A dense pipeline stage plans one layer without tokens.
        """
        group, num_layers, num_experts = self.group, len(self.layers), self.model.num_experts

        def count() -> NDArray[np.int32]:
            counted = count_routing(routing, num_layers=num_layers, num_experts=num_experts, top_k=self.model.top_k)
            if not num_layers:
                return np.zeros((max(1, len(routing)), 1, num_experts), np.int32)
            if not len(routing):
                raise InputError("there is nothing to plan: routing has no micro-batches")
            return counted

        counts_MLE = group.all_succeed(count, what="comparing routing with the model")
        group.agree(f"{len(routing)}", what="the number of micro-batches")
        return StepLoad(tokens_MLER=gather_counts(group, counts_MLE, what="gathering counts of routing"))

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
        """Indices of this group's micro-batches in the plan."""
        num = step.plan.num_micro_batches // self.group.num_groups
        return range(self.group.index * num, (self.group.index + 1) * num)

    def _arm(self, step: Step, stage: Stage, *, start: int = 0) -> None:
        """Give each layer the visits of this group's micro-batches, in order."""
        for layer in self.layers:
            keys = [VisitKey(stage, m, layer.layer) for m in self._micro_batches(step)[start:]]
            layer.arm([partial(self._planned_slots, step.plan, key) for key in keys])

    def _planned_slots(self, plan: StepPlan, key: VisitKey) -> SlotTable:
        return self._in_slots(plan.visit(*key))

    def _in_slots(self, visit: Visit, *, scale: int = 0) -> SlotTable:
        expert_of_slot, group = self.slots.expert_of_slot[visit.key.layer], self.group
        return slot_table(visit, expert_of_slot, self.counts, group.rank, group.ranks_of_node, scale)
