"""`balance` switches a Megatron model's MoE layers to planned execution; its `Balancer` plans steps.

    balancer = balance(model, MegatronSetting(spare_slots=2), optimizer=optimizer)      # on all ranks, once
    step = balancer.begin(routing)              # collective: counts, plan, moved homes; routing is [M][L] ids [T, K]
    forward_backward_func(...)                  # as before, with RouterReplay; micro-batches in the same order
    optimizer.step()
    balancer.end()                              # unplanned passes (evaluation) may follow

`prepare(routing)` plans a step in the background while another runs; `begin` takes its result. The ranks of a pipeline
stage plan from the same counts and compare the plan's hash. Passes outside a step run on homes alone.
Two modes need no recorded routing and no `begin`. `MegatronSetting(mode="live")` plans every forward as it begins;
`mode="history"` plans a step from those before it. `begin_from_past_steps()` before each step fetches what history
plans, and the standing copies with which live evens out nodes.
`planner="static"` switches balancing off: homes return to where plain Megatron puts them, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor, nn

from equilibra.core.errors import BrokenStateError, InputError
from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Placement
from equilibra.core.plan import GroupPlan, StandingCopies, StepPlan
from equilibra.core.visit import Stage, VisitKey, only_homes
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.copies.transfer import Path
from equilibra.execute.group import ExpertGroup, device_name
from equilibra.execute.record import Recorder
from equilibra.integrations.executor.balancer import Routing, Step, VisitBalancer, gather_objects, stage_group
from equilibra.integrations.executor.live import LivePlanner, PastLoads, SharePlanner
from equilibra.integrations.megatron import layer as megatron_layer
from equilibra.integrations.megatron.copies import SharedCopies
from equilibra.integrations.megatron.homes import StateOfParameters, guard_optimizer, move_layer, weights_in
from equilibra.integrations.megatron.visits import Ahead, MegatronVisits
from equilibra.integrations.planned import HomeSlots, MegatronSetting, SlotCounts, SlotTable
from equilibra.plan.history import SCALE
from equilibra.plan.step import late_stages

TOLERANCE = 0.005
"""for planners that have no tolerance of their own"""


def balance(
    model: nn.Module | Sequence[nn.Module], setting: MegatronSetting | None = None, *, optimizer: Any = None  # noqa: ANN401
) -> Balancer:  # fmt: skip
    """Collective over the world: switch the MoE layers of a model, or of its chunks, to planned execution.

    Call it before or after wrapping in DDP: no parameter changes. optimizer: Megatron's; homes move only with it.
    Multi-token prediction layers are left out, since rollouts do not record them. A pipeline stage without MoE layers
    gets a balancer too.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    device = next((one.device for chunk in chunks for one in chunk.parameters()), None)
    setting = (setting or MegatronSetting()).on(device_name(device))
    for one in (*chunks, *getattr(optimizer, "chained_optimizers", [optimizer])):
        megatron_layer.check_wrapping(getattr(one, "ddp_config", None))
    layers = _layers_of(chunks)
    if not any(gather_objects(len(layers))):
        raise InputError("there is nothing to balance: no pipeline stage of the model has MoE layers")
    config = layers[0].config if layers else chunks[0].config
    megatron_layer.check_config(config)
    expert_parallel, data_parallel = _groups_of(layers)
    cluster = setting.cluster_of(expert_parallel.size())
    group = stage_group(expert_parallel, data_parallel, cluster, setting.timeout_s)
    group.agree(f"{len(layers)} MoE layers, {setting.description(cluster)}", what="how steps are planned")
    counts = setting.slot_counts(cluster)
    visits = [megatron_layer.balance_layer(layer, number, group, counts) for number, layer in enumerate(layers)]
    megatron_layer.wait_for_gathers(chunks, visits, optimizer)
    balancer = Balancer(group, setting, visits, _model_of(config, visits), counts, optimizer)
    megatron_layer.hold_buckets(chunks, visits, balancer.copies.bring_home)
    return balancer


def _layers_of(chunks: Sequence[nn.Module]) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    found = [
        module for chunk in chunks for name, module in chunk.named_modules()
        if isinstance(module, MoELayer) and "mtp" not in name.split(".")
    ]  # fmt: skip
    if any(getattr(layer, "visits", None) is not None for layer in found):
        raise InputError("the model is balanced already: call balance() once")
    if any(type(layer) not in {MoELayer, megatron_layer.balanced_class()} for layer in found):
        kinds = sorted({type(layer).__name__ for layer in found})
        raise InputError(f"cannot balance MoE layers of type {', '.join(kinds)}: they must be Megatron's MoELayer")
    return found


def _groups_of(layers: list[Any]) -> tuple[Any, Any]:
    """The expert-parallel and expert-data-parallel groups of the layers, or Megatron's if there are no layers."""
    from megatron.core import parallel_state  # noqa: PLC0415

    if not layers:
        return parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_data_parallel_group()
    experts = layers[0].experts
    return layers[0].ep_group, getattr(experts, "dp_group", None) or parallel_state.get_expert_data_parallel_group()


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A step that is being planned in the background."""

    load: StepLoad
    """load of all ranks"""
    previous: Placement
    """homes at the start of the plan"""
    plan: Future[StepPlan]
    reused: bool = False
    """whether the plan is the previous step's, which had the same load"""


class Balancer(VisitBalancer[MegatronVisits, MegatronSetting]):
    """Plans steps, moves homes and arms the layers of this rank's pipeline stage."""

    def __init__(
        self, group: ExpertGroup, setting: MegatronSetting, layers: list[MegatronVisits], model: MoEModel,
        counts: SlotCounts, optimizer: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(group, setting, layers, model, counts)
        moves = optimizer is not None and setting.max_moves_per_layer and setting.mode != "live"
        self.state = StateOfParameters(optimizer) if moves else None
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="equilibra-plan")
        self._last: Step | None = None
        self.broken: str | None = None
        """what to say after a move was interrupted: state is mixed"""
        self._lent = False
        """whether slots hold weights that are lent to them"""
        self.recorder = Recorder(group.rank, on=False, finish=group.watch.finish)
        """measured events of copies, once it is switched on"""
        depth, path = int(setting.prefetch), Path(setting.path) if counts.flash else Path.COLLECTIVE
        if setting.mode == "live":  # other paths publish what a plan copies, ahead of the layers
            depth, path = 0, Path.COLLECTIVE
        self.ahead = Ahead(layers)
        self.copies = SharedCopies(
            group, [visits.homes for visits in layers],
            CopySetting(
                spare_slots=counts.flash, prefetch_depth=depth, path=dict.fromkeys(Stage, path),
            ),
            self.recorder, self.ahead if depth else lambda _key, _direction: [],
        )  # fmt: skip
        for visits in layers:
            visits.shared = self.copies
        for part in self.state.parts if self.state else []:
            guard_optimizer(part, lambda: not self.slots.is_contiguous)
        self._place_homes()
        self.live: LivePlanner | None = None
        """plans forwards as they begin, with mode="live" """
        self.history: SharePlanner | None = None
        """follows plans of past steps, with mode="history" """
        self.past: PastLoads | None = None
        """loads of past steps, if standing copies are chosen by them"""
        self._prepared: Prepared | None = None
        """the next step, planned from past ones"""
        if self.planner.name != "static" and setting.mode != "replay":
            self._plan_without_routing(optimizer)

    def _plan_without_routing(self, optimizer: Any) -> None:  # noqa: ANN401
        num_layers, setting = len(self.layers), self.setting
        if self.counts.standing or setting.mode == "history":
            self.past = PastLoads(
                self.group, num_layers=num_layers, num_experts=self.model.num_experts, num_steps=setting.history_steps
            )
            if optimizer is not None:
                self.attend(optimizer)
        if setting.mode == "history":
            self.history = SharePlanner(self.group.num_ranks)
        else:
            self.live = LivePlanner(
                self.group, self._rates, num_layers=num_layers, spare_slots=setting.spare_slots,
                tolerance=getattr(self.planner, "tolerance", TOLERANCE),
            )  # fmt: skip
        for visits in self.layers:
            visits.live = self._live_slots

    def attend(self, optimizer: Any) -> None:  # noqa: ANN401 - Megatron's
        """When this optimizer steps, drop standing copies before, and plan the next step in the background after."""
        step = optimizer.step

        @wraps(step)
        def attended(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self.end()
            result = step(*arguments, **options)
            self.prepare_from_past_steps()
            return result

        optimizer.step = attended

    def _live_slots(self, layer: int, counts_E: Tensor) -> SlotTable:
        if self.past is not None:
            self.past.note(layer, counts_E)
        if self.live is not None:
            return self._in_slots(self.live.visit(layer, self._home_LE[layer], counts_E))
        slots = self.layers[layer].fixed or self.layers[layer].without_plan
        assert slots is not None
        return slots

    def prepare_from_past_steps(self) -> None:
        """Collective, after a step: gather its loads, and plan the next one in the background."""
        if self.past is None:
            return
        self.end()
        load = self.past.gather()
        if load is None or not self.layers:
            return
        if self.history is not None:
            self.history.observe(load)
        self._prepare(self.past.together())

    def _prepare(self, load: StepLoad) -> None:
        plan = self._planning.submit(self._plan_moves, load, self.placement)
        self._prepared = Prepared(load=load, previous=self.placement, plan=plan)

    def begin_from_past_steps(self, stage: Stage = Stage.UPDATE) -> Step | None:
        """Collective, before a step without recorded routing: standing copies and homes that suit past steps.

        The loads of an update are noted. If the optimizer was given to `balance`, the plan has been made in the
        background since its last step, else it is made now. None before the first step, which has no standing copies,
        and where nothing is planned from past steps: in live mode on one node, and with balancing switched off. The
        imbalances of what is returned are those of past steps; `take_imbalance()` has those of what runs.
        """
        if self.setting.mode == "replay":
            raise InputError("mode='replay' plans from recorded routing: call begin(routing), or choose another mode")
        if self.past is None:
            return None
        self.prepare_from_past_steps()
        if self._prepared is None and self._last is not None and self._last.plan.placement != self.placement:
            self._prepare(self._last.load)
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            step = self._step(prepared)
            self.group.agree(f"plan {step.plan.digest}", what="the plan of the step")
            self.move_homes(step.plan.placement)
        if self._last is not None:
            self.arm(self._last, stage)
            if self.live is not None:
                self.live.stand(self._last.plan.standing)
            else:
                self._follow(self._last)
        self.past.noting = stage is Stage.UPDATE
        return self._last

    def _follow(self, step: Step) -> None:
        assert self.history is not None
        for layer, visit in self.history.follow(step.plan, step.load).items():
            self.layers[layer].fixed = self._in_slots(visit, scale=SCALE)

    def prepare(self, routing: Routing) -> Prepared:
        """Collective: gather the counts of a later step and plan it in the background; pass the result to `begin`."""
        load = self._load(routing)
        previous, last = self.placement, self._last
        if (  # all ranks see the same loads, so all decide alike
            last is not None
            and last.plan.placement == previous
            and np.array_equal(last.load.tokens_MLER, load.tokens_MLER)
        ):
            plan: Future[StepPlan] = Future()
            plan.set_result(last.plan)
            return Prepared(load=load, previous=previous, plan=plan, reused=True)
        return Prepared(load=load, previous=previous, plan=self._planning.submit(self._plan_moves, load, previous))

    def begin(self, routing: Routing | Prepared, stage: Stage = Stage.UPDATE) -> Step:
        """Collective: plan the micro-batches of an optimizer step, move homes, arm the layers.

        If the load equals the previous step's (say, after a log-prob stage with the same micro-batches), its plan is
        reused. routing: for each micro-batch of this rank, in order, the experts [T, K] of each MoE layer of this
        pipeline stage, or the result of `prepare`; [] on a stage without MoE layers.
        """
        if self.broken:
            raise BrokenStateError(self.broken)
        if self.setting.mode != "replay" and self.planner.name != "static":
            raise InputError(
                f"mode={self.setting.mode!r} needs no recorded routing: call begin_from_past_steps() instead of "
                "begin(), or use mode='replay'"
            )
        self.end()
        if self.planner.name == "static":
            self.restore_homes()
        step = self._step(routing if isinstance(routing, Prepared) else self.prepare(routing))
        self.group.agree(f"plan {step.plan.digest}", what="the plan of the step")
        self.move_homes(step.plan.placement)
        self.arm(step, stage)
        return step

    def arm(self, step: Step, stage: Stage = Stage.UPDATE, *, start: int = 0) -> None:
        """Begin another pass over the step's micro-batches, from micro-batch `start`.

        LOGPROB is a pass without backward (old log-probs), UPDATE one with backward. start: above 0 where one plan
        covers several optimizer steps, so that copies are fetched with the updated weights.
        """
        if step.plan.placement != self.placement:
            raise InputError("cannot arm this step: homes have moved since it began; begin() it again")
        self.end()
        self.ahead.arm(stage)
        self.copies.arm(GroupPlan(
            plan=step.plan, load=step.load, micro_batches=list(self._micro_batches(step)),
            late=late_stages(step.plan, step.load, self._rates),
        ))  # fmt: skip
        self._arm(step, stage, start=start)

    def end(self) -> None:
        """Disarm: later passes run on homes alone. Waits for copies and gradients in transit."""
        if self._lent:
            raise InputError("experts have lent weights for an export: finish or close it before the next pass")
        for visits in self.layers:
            visits.arm(None)
            visits.fixed = None
        if self.past is not None:
            self.past.noting = False
        if self.live is not None:
            self.live.stand(StandingCopies.none())
            self.copies.arm(None)
        else:
            self.copies.end()

    def _step(self, prepared: Prepared) -> Step:
        plan, reused = prepared.plan.result(), prepared.reused
        if prepared.previous != self.placement:  # homes have moved since `prepare`
            plan, reused = self._plan_moves(prepared.load, self.placement), False
        self._last = Step(plan=plan, load=prepared.load, reused=reused)
        return self._last

    def _plan_moves(self, load: StepLoad, previous: Placement) -> StepPlan:
        moves = self.setting.max_moves_per_layer if self.state else 0
        plan = self._plan(load, previous, max_moves_per_layer=moves)
        return plan if self.setting.mode == "replay" else plan.without_flash()

    # --- homes ---

    def move_homes(self, placement: Placement) -> None:
        """Collective, between optimizer steps: move homes and their optimizer state."""
        self._move_to(self.slots.moved_to(placement))

    def restore_homes(self) -> None:
        """Collective: move every expert and its optimizer state back to where plain Megatron puts it."""
        self._move_to(self._contiguous_slots())

    @contextmanager
    def homes_restored(self) -> Iterator[None]:
        """Collective: restore homes for an exporter that numbers experts by rank, and move them back afterwards.

        They also move back if the exporter fails on some ranks, but not after an interrupted move.
        """
        before = self.slots
        self.restore_homes()
        try:
            yield
        finally:
            if not self.broken:
                self._move_to(before)

    @contextmanager
    def logical_weights(self) -> Iterator[None]:
        """Collective: for an exporter of weights that numbers experts by rank, lend every slot its plain expert's.

        Only weights travel, once; a rank keeps its own beside those that it is lent, and takes them back alone. No pass
        may run meanwhile.
        """
        if self.broken:
            raise BrokenStateError(self.broken)
        self.end()
        after, lent = self._contiguous_slots(), list[tuple[nn.Parameter, Tensor]]()
        for visits in self.layers:
            visits.homes.check_version(visits.layer)
            lent += weights_in(visits, self.slots.moves_to(after, visits.layer))
        own, self._lent = [(parameter, parameter.data) for parameter, _ in lent], True
        try:
            for parameter, weights in lent:
                parameter.data = weights
            yield
        finally:
            self._lent = False
            for parameter, weights in own:
                parameter.data = weights

    def _move_to(self, after: HomeSlots) -> None:
        if self.broken:
            raise BrokenStateError(self.broken)
        if np.array_equal(after.expert_of_slot, self.slots.expert_of_slot):
            return
        if self.state is None:
            raise InputError(
                "homes cannot move without the optimizer, whose state would stay behind: pass it to balance(), with "
                "max_moves_per_layer other than 0"
            )
        self.end()
        self.broken = (
            "a move of homes was cut off: experts and their optimizer state are mixed; load the last checkpoint"
        )
        for visits in self.layers:
            visits.homes.check_version(visits.layer)
            move_layer(visits, self.slots.moves_to(after, visits.layer), self.state)
        self.broken, self.slots = None, after
        self._place_homes()

    def _place_homes(self) -> None:
        moved = not self.slots.is_contiguous
        placement = self.placement
        self._home_LE = placement.home_of_expert
        for visits in self.layers:
            visits.homes.expert_of_home = self.slots.expert_of_slot[visits.layer, self.group.rank].tolist()
            visits.moved = moved
            visits.without_plan = self._in_slots(only_homes(placement, VisitKey.once(visits.layer)))


def _model_of(config: Any, layers: list[MegatronVisits]) -> MoEModel:  # noqa: ANN401
    """The layers' shapes, for prices; one layer if the stage has none."""
    dtype = layers[0].homes.dtype if layers else config.params_dtype
    return MoEModel(
        name="megatron", num_layers=max(1, len(layers)), hidden=int(config.hidden_size),
        expert_ffn=int(config.moe_ffn_hidden_size or config.ffn_hidden_size), num_experts=int(config.num_moe_experts),
        top_k=int(config.moe_router_topk), weight_bytes=dtype.itemsize,
    )  # fmt: skip
