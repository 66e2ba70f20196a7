"""`balance`: a Megatron model's MoE layers under plans, and the steps that plan them.

    balancer = balance(model, MegatronSetting(spare_slots=2), optimizer=optimizer)      # on all ranks, once
    step = balancer.begin(routing)              # collective: counts, plan, moved homes; routing is [M][L] ids [T, K]
    forward_backward_func(...)                  # as before, with RouterReplay; micro-batches in their order
    optimizer.step()
    balancer.end()                              # passes that are not planned (evaluation) may follow

Ranks of a pipeline stage plan from the same counts and compare the plan's hash. Passes without a step run on homes
alone. `planner="static"` is the switch: homes go back to where plain Megatron has them, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from equilibra.core.cluster import Cluster
from equilibra.core.errors import BrokenStateError, InputError
from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.rates import Rates, rates_for
from equilibra.execute.group import ExpertGroup
from equilibra.execute.visits.tables import instances_of, only_homes
from equilibra.integrations.megatron.checkpoint import guard_optimizer
from equilibra.integrations.megatron.groups import stage_group
from equilibra.integrations.megatron.homes import StateOfParameters, move_layer
from equilibra.integrations.megatron.layer import balance_layer, balanced_class, check_config, check_wrapping
from equilibra.integrations.megatron.place import Place
from equilibra.integrations.megatron.routing import Routing, count_routing
from equilibra.integrations.megatron.slots import HomeSlots, Visit, contiguous_slots, visit_of
from equilibra.measure.imbalance import imbalance
from equilibra.plan.planner import Planner, StepProblem, planner_named

__all__ = ["Balancer", "MegatronSetting", "Step", "balance"]

STATIC = "static"


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


def balance(
    model: nn.Module | Sequence[nn.Module], setting: MegatronSetting | None = None, *, optimizer: Any = None  # noqa: ANN401
) -> Balancer:  # fmt: skip
    """Switch the MoE layers of a model, or of its chunks, to planned execution; on all processes of the world.

    Before or after it is wrapped in DDP: no parameter changes. optimizer: Megatron's, with which homes can move.
    Layers of multi-token prediction stay as they are: rollouts do not record them.
    """
    setting = setting or MegatronSetting()
    chunks = [model] if isinstance(model, nn.Module) else model
    for one in (*chunks, *getattr(optimizer, "chained_optimizers", [optimizer])):
        check_wrapping(getattr(one, "ddp_config", None))
    layers = _layers_of(chunks)
    config = layers[0].config
    check_config(config)
    ranks = layers[0].ep_group.size()
    per_node = setting.ranks_per_node or min(8, ranks)
    if ranks % per_node:
        raise InputError(f"{ranks} expert-parallel ranks cannot be nodes of {per_node}: set ranks_per_node")
    cluster = Cluster(num_nodes=ranks // per_node, ranks_per_node=per_node)
    data_parallel = _expert_data_parallel(layers[0])
    group = stage_group(layers[0].ep_group, data_parallel, cluster, setting.timeout_s)
    places = [balance_layer(layer, number, group, setting.spare_slots) for number, layer in enumerate(layers)]
    return Balancer(group, setting, places, config, optimizer)


def _layers_of(chunks: Sequence[nn.Module]) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    found = [
        module for chunk in chunks for name, module in chunk.named_modules()
        if isinstance(module, MoELayer) and "mtp" not in name.split(".")
    ]  # fmt: skip
    if not found:
        raise InputError("there is nothing to balance: the model has no MoE layers on this pipeline stage")
    if any(getattr(layer, "place", None) is not None for layer in found):
        raise InputError("the model is balanced already: balance() it once")
    if any(type(layer) not in {MoELayer, balanced_class()} for layer in found):
        raise InputError("the model's MoE layers are a subclass of MoELayer that is not known here")
    return found


def _expert_data_parallel(layer: Any) -> Any:  # noqa: ANN401
    from megatron.core import parallel_state  # noqa: PLC0415

    return getattr(layer.experts, "dp_group", None) or parallel_state.get_expert_data_parallel_group()


class Balancer:
    """Plans, moves and arms; one per rank, for the layers of its pipeline stage."""

    def __init__(
        self, group: ExpertGroup, setting: MegatronSetting, places: list[Place], config: Any, optimizer: Any  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.group, self.setting, self.places = group, setting, places
        self.planner = planner_named(setting.planner) if isinstance(setting.planner, str) else setting.planner
        group.agree(
            f"{self.planner.name}, {setting.spare_slots} spare slots, nodes of {group.cluster.ranks_per_node}, "
            f"{setting.max_moves_per_layer} moves, seed {setting.seed}, "
            f"{sha256(repr(setting.rates).encode()).hexdigest()}",
            what="how steps are planned",
        )
        self.num_experts, self.top_k = int(config.num_moe_experts), int(config.moe_router_topk)
        self.slots = contiguous_slots(group.cluster, num_layers=len(places), num_experts=self.num_experts)
        self.state = None if optimizer is None else StateOfParameters(optimizer)
        self._last: Step | None = None
        self.broken: str | None = None
        """why experts are mixed, once a move was cut off"""
        self._rates = setting.rates or rates_for(_model_of(config, places), num_nodes=group.cluster.num_nodes)
        for part in self.state.parts if self.state else []:
            guard_optimizer(part, lambda: not self.slots.is_contiguous)
        self._place_homes()

    @property
    def placement(self) -> Placement:
        """Homes now."""
        return self.slots.placement

    def begin(self, routing: Routing, stage: Stage = Stage.UPDATE) -> Step:
        """Collective: plan the micro-batches of an optimizer step, move homes, arm.

        With the load of the step before, as when old log-probabilities had the same micro-batches, its plan is taken.
        routing: for each micro-batch of this rank, in order, the experts [T, K] of each MoE layer of this pipeline
        stage.
        """
        if self.broken:
            raise BrokenStateError(self.broken)
        self.end()
        if self.planner.name == STATIC:
            self.restore_homes()
        step = self._step(self._gather(routing))
        self.group.agree(f"plan {step.plan.digest}", what="the plan of the step")
        self.move_homes(step.plan.placement)
        self.arm(step, stage)
        return step

    def arm(self, step: Step, stage: Stage = Stage.UPDATE) -> None:
        """Begin another pass over the step's micro-batches: the first forward that comes is of the first of them.

        RECOMPUTE is a pass without backward (old log-probabilities), UPDATE one with it.
        """
        if step.plan.placement != self.placement:
            raise InputError("cannot arm a step of another placement: homes have moved since it began")
        num = step.plan.num_micro_batches // self.group.num_groups
        first = self.group.index * num
        for place in self.places:
            place.arm([partial(self._visit, step.plan, stage, place.layer, first + m) for m in range(num)])

    def end(self) -> None:
        """Passes from now on run without a plan, on homes alone."""
        for place in self.places:
            place.arm(None)

    def _gather(self, routing: Routing) -> StepLoad:
        """Counts of all ranks; ids stay where they are."""
        counts: list[NDArray[np.int32]] = []

        def count() -> None:
            layers, experts = len(self.places), self.num_experts
            counts.append(count_routing(routing, num_layers=layers, num_experts=experts, top_k=self.top_k))
            if not len(routing):
                raise InputError("there is nothing to plan: no micro-batches")

        self.group.all_succeed(count, what="comparing routing with the model")
        self.group.agree(f"{len(routing)}", what="the number of micro-batches")
        every = np.stack(self.group.gather(counts[0], what="gathering counts of routing"))
        shape = (self.group.num_groups, self.group.num_ranks, *counts[0].shape)
        tokens_GMLER = every.reshape(shape).transpose(0, 2, 3, 4, 1)
        tokens = np.ascontiguousarray(tokens_GMLER.reshape(-1, *tokens_GMLER.shape[2:]), np.int32)
        return StepLoad(tokens_MLER=tokens)

    def _step(self, load: StepLoad) -> Step:
        """Planned, or with the plan of the last step: all ranks see the same loads, so they do the same."""
        last = self._last
        if (
            last is not None
            and last.plan.previous == last.plan.placement == self.placement
            and np.array_equal(last.load.tokens_MLER, load.tokens_MLER)
        ):
            return replace(last, reused=True)
        self._last = Step(plan=self._plan(load), load=load)
        return self._last

    def _plan(self, load: StepLoad) -> StepPlan:
        """The same on every rank of the stage."""
        setting = self.setting
        problem = StepProblem(
            cluster=self.group.cluster, given_load=load, previous=self.placement,
            spare_slots=setting.spare_slots, standing_slots=0,
            max_moves_per_layer=setting.max_moves_per_layer if self.state else 0, rates=self._rates, seed=setting.seed,
        )  # fmt: skip
        plan = self.planner.plan(problem)
        plan.check(load, spare_slots=setting.spare_slots, standing_slots=0)
        return plan

    def _visit(self, plan: StepPlan, stage: Stage, layer: int, micro_batch: int) -> Visit:
        instances = instances_of(plan, stage, layer, micro_batch)
        return visit_of(self.slots.expert_of_slot[layer], self.setting.spare_slots, instances, self.group.rank)

    # --- homes ---

    def move_homes(self, placement: Placement) -> None:
        """Collective, between optimizer steps: move homes with their optimizer state."""
        self._move_to(self.slots.moved_to(placement))

    def restore_homes(self) -> None:
        """Collective: every expert, and its optimizer state, back to the slot where plain Megatron has it."""
        self._move_to(contiguous_slots(self.group.cluster, num_layers=len(self.places), num_experts=self.num_experts))

    @contextmanager
    def homes_restored(self) -> Iterator[None]:
        """Collective: for exporters that number experts by rank; homes go back to where they were afterwards."""
        before = self.slots
        self.restore_homes()
        yield
        self._move_to(before)

    def _move_to(self, after: HomeSlots) -> None:
        if np.array_equal(after.expert_of_slot, self.slots.expert_of_slot):
            return
        if self.state is None:
            raise InputError(
                "homes cannot move without the optimizer, whose state would stay behind: give it to balance()"
            )
        self.end()
        self.broken = (
            "a move of homes was cut off: experts and their optimizer state are mixed; load the last checkpoint"
        )
        for place in self.places:
            move_layer(place, self.slots.moves_to(after, place.layer), self.state)
        self.broken, self.slots = None, after
        self._place_homes()

    def _place_homes(self) -> None:
        moved = not self.slots.is_contiguous
        placement = self.placement
        for place in self.places:
            of_layer = self.slots.expert_of_slot[place.layer]
            place.expert_of_home, place.moved = of_layer[self.group.rank].tolist(), moved
            plain = only_homes(placement, place.layer)
            place.without_plan = visit_of(of_layer, self.setting.spare_slots, plain, self.group.rank)


def _model_of(config: Any, places: list[Place]) -> MoEModel:  # noqa: ANN401
    """The layers' shapes, for prices."""
    return MoEModel(
        name="megatron", num_layers=len(places), hidden=int(config.hidden_size),
        expert_ffn=int(config.moe_ffn_hidden_size or config.ffn_hidden_size), num_experts=int(config.num_moe_experts),
        top_k=int(config.moe_router_topk), weight_bytes=next(iter(places[0].parts[0].values())).dtype.itemsize,
    )  # fmt: skip
