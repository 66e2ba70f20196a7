"""Runtime: what the layers of one model share on this rank while a plan is executed.

It knows the plan that is armed, the micro-batch that runs, and the version of the weights; it fetches copies ahead of
the layers that need them and sees gradients home. Layers ask it for tables and instances; the Balancer arms it.

Order. Every rank runs the same program, so calls that involve others are made in the same order everywhere. What is
fetched ahead follows from the order of visits alone: in the forward pass the layers that come next, in the backward
pass those before; at the ends, the micro-batch that comes next. A wrong guess costs a fetch, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from equilibra.core.errors import BrokenStateError, InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StepPlan
from equilibra.execute import expert_math
from equilibra.execute.collective import CollectiveEngine
from equilibra.execute.expert_math import ExpertParts
from equilibra.execute.functions import Pass, direction_now
from equilibra.execute.group import Channel, ExpertGroup, Pending
from equilibra.execute.host import HostEngine
from equilibra.execute.micro_batch import NUMBER, MicroBatch
from equilibra.execute.record import Recorder
from equilibra.execute.slots import SpareSlots
from equilibra.execute.spec import Activation, MoESpec
from equilibra.execute.standing import Sources, StandingStore
from equilibra.execute.tables import Instances, instances_of, only_homes, planned_counts, receive_table, send_table
from equilibra.execute.transfer import CopyList, Path, TransferEngine, copied_of, copy_list
from equilibra.execute.visit import Tables, Where, on_device
from equilibra.execute.weights import ExpertWeights
from equilibra.measure.events import Direction, Kind, Resource, StageNumber

__all__ = ["Armed", "CopySetting", "Runtime"]

Saved = tuple[Tensor, Tensor, Tensor]
"""rows [N, D], the first product [N, 2F] and the gradient of the results [N, D]"""
STAGE = {number: stage for stage, number in NUMBER.items()}
ENGINES: dict[Path, type[CollectiveEngine | HostEngine]] = {Path.COLLECTIVE: CollectiveEngine, Path.HOST: HostEngine}


@dataclass(frozen=True, kw_only=True)
class CopySetting:
    """How copies are kept and moved."""

    spare_slots: int = 2
    """flash copies a rank can hold for one layer"""
    prefetch_depth: int = 1
    """layers ahead that copies are fetched; memory is spare_slots x (prefetch_depth + 1) experts per rank"""
    path: dict[Stage, Path] = field(default_factory=lambda: dict.fromkeys(Stage, Path.COLLECTIVE))
    """path of flash copies in each stage"""

    def __post_init__(self) -> None:
        for name in ("spare_slots", "prefetch_depth"):
            if not 0 <= getattr(self, name) <= 4096:
                raise InputError(f"{name} must be a whole number from 0 to 4096, not {getattr(self, name)!r}")
        if set(self.path) != set(Stage):
            raise InputError(f"path needs the stages {', '.join(Stage)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Armed:
    """A plan to be executed, with the load it was made for."""

    plan: StepPlan
    """the same on every rank"""
    load: StepLoad
    """counts of all ranks, which give all sizes"""
    micro_batches: list[int]
    """numbers of those that this expert-parallel group runs, in order"""


class Runtime:
    """Shared by the MoE layers of a model on one rank."""

    def __init__(self, group: ExpertGroup, placement: Placement, setting: CopySetting | None = None) -> None:
        self.group, self.placement = group, placement
        self.setting = setting or CopySetting()
        self.weights: list[ExpertWeights] = []
        """by layer"""
        self.current: MicroBatch | None = None
        """the micro-batch that runs"""
        self.version = 0
        """of the weights: counts their changes"""
        self.recorder = Recorder(group.rank)
        self.gradients_under_way = False
        """whether copies may hold gradients that their homes do not have yet"""
        self.broken: str | None = None
        """why the state in memory must not be used"""
        self._armed: Armed | None = None
        self._slots: SpareSlots | None = None
        self._engines: dict[Path, TransferEngine] = {}
        self._sources: Sources | None = None
        self._lists: dict[tuple[int, int, int], CopyList] = {}
        self._returning: Pending | None = None
        self._returned_from: tuple[Where, CopyList, float]
        """visit, copies and time of the gradients on their way"""

    # --- set up ---

    def register(self, weights: ExpertWeights) -> int:
        """Add a layer; returns its number."""
        if self.weights and weights.spec.part_shapes() != self.weights[0].spec.part_shapes():
            raise InputError("all MoE layers of a model must have experts of the same shapes to share spare slots")
        self.weights.append(weights)
        return len(self.weights) - 1

    @property
    def spec(self) -> MoESpec:
        """Of the layers."""
        return self.weights[0].spec

    @property
    def activation(self) -> Activation:
        """Inside the experts."""
        return self.spec.activation

    # --- plans ---

    def arm(self, armed: Armed) -> None:
        """Execute this plan from now on. Homes must have moved already."""
        plan, setting = armed.plan, self.setting
        if plan.placement != self.placement:
            raise InputError("a plan was armed before its homes had moved")
        plan.check(armed.load, spare_slots=setting.spare_slots)
        self.finish_returns()
        if self._slots is not None:
            self._slots.forget()
        self._armed, self._lists = armed, {}
        standing = StandingStore(self.group, self.weights, plan)
        self._sources = Sources(weights=self.weights, standing=standing)
        self._prepare_copies()
        self._offer_weights()

    def disarm(self) -> None:
        """No plan: tokens are routed live to homes."""
        self.finish_returns()
        if self._slots is not None:
            self._slots.forget()
        self._armed, self._sources, self._lists = None, None, {}

    def _prepare_copies(self) -> None:
        """Buffers and engines, when a plan first needs them."""
        assert self._sources is not None
        like = self.weights[0]
        row = torch.zeros(like.layout.size, dtype=like.dtype, device=like.device)
        if self._slots is None:
            self._slots = SpareSlots(num_slots=self.setting.spare_slots, depth=self.setting.prefetch_depth, row=row)
        for path in dict.fromkeys(self.setting.path.values()):  # in the same order on every rank
            if path not in self._engines:
                self._engines[path] = ENGINES[path](
                    self.group, self._sources, num_slots=self.setting.spare_slots, row=row,
                    gradient_dtype=like.gradient_dtype,
                )  # fmt: skip
            self._engines[path].source = self._sources  # type: ignore[attr-defined]

    def weights_changed(self) -> None:
        """Weights are new on every rank: what was copied is forgotten, and copies are fetched anew."""
        self.finish_returns()
        if self._slots is not None:
            self._slots.forget()
        if self._sources is not None:
            self._sources.standing.forget()
        self.version += 1
        self._offer_weights()

    def _offer_weights(self) -> None:
        for weights in self.weights:
            weights.note_version()
        if self._armed is None or self._sources is None:
            return
        for layer in range(min(self.setting.prefetch_depth + 1, len(self.weights))):
            self._sources.standing.start(layer)
        for path, engine in self._engines.items():
            stages = [stage for stage in Stage if self.setting.path[stage] is path]
            if path is not Path.COLLECTIVE:
                for layer in range(len(self.weights)):  # published copies may be made of standing ones
                    self._sources.standing.start(layer)
            engine.publish(self.version, copied_of(self._armed.plan, stages, self.group))

    # --- visits ---

    def enter_layer(self, where: Where, direction: Direction) -> None:
        """A layer begins: what ran since the last one was attention and other dense parts."""
        if self.broken is not None:
            raise BrokenStateError(self.broken)
        since = self.recorder.dense_since
        if since is not None:
            self.recorder.add(Kind.ATTENTION, Resource.COMPUTE, where, direction, since, perf_counter())
        self.recorder.dense_since = None

    def leave_layer(self) -> None:
        """A layer ends."""
        self.recorder.dense_since = perf_counter()

    def tables(self, layer: int, experts_TK: Tensor) -> Tables:
        """Where this layer's rows go: from the plan where there is one, else from counts that ranks exchange."""
        micro_batch = self.current
        if micro_batch is None:
            return self._counted_tables(self.where(layer), only_homes(self.placement, layer), experts_TK)
        if micro_batch.planned:
            return micro_batch.tables(layer, lambda: self._planned_tables(micro_batch, layer))
        return self._counted_tables(micro_batch.where(layer), self._instances_of(micro_batch, layer), experts_TK)

    def where(self, layer: int) -> Where:
        """The visit of a layer that begins now."""
        if self.current is not None:
            return self.current.where(layer)
        return Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=layer)

    def _instances_of(self, micro_batch: MicroBatch, layer: int) -> Instances:
        if self._armed is None:
            return only_homes(self.placement, layer)
        return instances_of(self._armed.plan, micro_batch.stage, layer, micro_batch.number)

    def _planned_tables(self, micro_batch: MicroBatch, layer: int) -> Tables:
        assert self._armed is not None
        instances, rank = self._instances_of(micro_batch, layer), self.group.rank
        experts_TK = micro_batch.experts_TLK[:, layer].astype(np.int64)
        counts_IR = planned_counts(self._armed.load, instances, layer, micro_batch.number, rank)
        return on_device(
            instances, send_table(experts_TK, instances, rank), receive_table(instances.on_rank(rank), counts_IR),
            rank, self.weights[layer].device,
        )  # fmt: skip

    def _counted_tables(self, where: Where, instances: Instances, experts_TK: Tensor) -> Tables:
        """The tolerant way: every source tells every rank how many rows its instances get."""
        group, rank = self.group, self.group.rank
        sent = send_table(experts_TK.cpu().numpy().astype(np.int64), instances, rank)
        experts_of_rank = [instances.on_rank(r) for r in range(group.num_ranks)]
        mine = experts_of_rank[rank]
        told = torch.from_numpy(np.concatenate([sent.counts_RE[r, of] for r, of in enumerate(experts_of_rank)]))
        heard = torch.empty(mine.size * group.num_ranks, dtype=told.dtype)
        with self.recorder.span(Kind.COUNTS, Resource.NVLINK, where, direction_now()):
            group.all_to_all(
                Channel.DISPATCH, told, [of.size for of in experts_of_rank], heard, [mine.size] * group.num_ranks,
                what=f"exchanging counts of MoE layer {where.layer}",
            ).wait()  # fmt: skip
        counts_IR = heard.view(group.num_ranks, mine.size).numpy().T.astype(np.int64)
        return on_device(instances, sent, receive_table(mine, counts_IR), rank, self.weights[where.layer].device)

    # --- instances ---

    def instances(self, visit: Pass, direction: Direction) -> list[ExpertParts]:
        """Homes, standing copies and flash copies of a visit, waited for; what comes next is on its way.

        Selective checkpointing counts operations, and a fetch is not one that comes again: it does not see them.
        """
        with _disable_current_modes():
            return self._instances(visit, direction)

    def _instances(self, visit: Pass, direction: Direction) -> list[ExpertParts]:
        layer, weights = visit.where.layer, self.weights[visit.where.layer]
        weights.check_version(layer)
        found = weights.homes()
        if visit.micro_batch is None or self._sources is None:
            return found
        start = perf_counter()
        arrived = self._sources.standing.wait(layer)
        if arrived is not None:
            _, experts, homes = arrived
            self.recorder.moved(Kind.STANDING_COPY, Resource.NIC, _of_step(layer), self._sources.standing.asked[layer],
                                experts, homes, num_bytes=self._row_bytes(gradient=False))  # fmt: skip
        found += self._sources.standing.parts(layer)[0]
        found += weights.layout.experts(self._flash_rows(visit.micro_batch.stage, visit.micro_batch.number, layer))
        if len(found) > weights.experts.size:
            self.recorder.add(Kind.WAIT, Resource.COMPUTE, visit.where, direction, start, perf_counter())
        self._look_ahead(visit.micro_batch, layer, direction)
        return found

    def _flash_rows(self, stage: Stage, micro_batch: int, layer: int) -> Tensor:
        assert self._slots is not None
        key = (NUMBER[stage], micro_batch, layer)
        copies, path = self._copies(key), self.setting.path[stage]
        taken = self._slots.take(key, copies, self._engines[path], self.version)
        if taken.started is not None:
            link = Resource.HOST_LINK if path is Path.HOST else Resource.COPY_ENGINE
            where = Where(stage=NUMBER[stage], micro_batch=micro_batch, layer=layer)
            self.recorder.moved(Kind.FLASH_COPY, link, where, taken.started, copies.held_expert, copies.held_origin,
                                num_bytes=self._row_bytes(gradient=False))  # fmt: skip
        return taken.rows_nP

    def _row_bytes(self, *, gradient: bool) -> int:
        like = self.weights[0]
        return like.layout.size * (like.gradient_dtype if gradient else like.dtype).itemsize

    def _copies(self, key: tuple[int, int, int]) -> CopyList:
        if key not in self._lists:
            assert self._armed is not None
            stage, micro_batch, layer = STAGE[StageNumber(key[0])], key[1], key[2]
            self._lists[key] = copy_list(instances_of(self._armed.plan, stage, layer, micro_batch), layer, self.group)
        return self._lists[key]

    def _look_ahead(self, micro_batch: MicroBatch, layer: int, direction: Direction) -> None:
        """Start to fetch what the next visits need."""
        assert self._armed is not None
        assert self._sources is not None
        assert self._slots is not None
        backward = direction is not Direction.FORWARD
        number = micro_batch.number
        turns = torch.is_grad_enabled() or micro_batch.stage is Stage.UPDATE
        for _ in range(self.setting.prefetch_depth):
            if not backward and layer == len(self.weights) - 1 and turns:
                backward = True  # the same layer comes again, backward
                continue
            layer += -1 if backward else 1
            if not 0 <= layer < len(self.weights):
                at = self._armed.micro_batches.index(number) + 1
                if at >= len(self._armed.micro_batches):
                    return
                number, layer, backward = self._armed.micro_batches[at], 0, False
            self._sources.standing.start(layer)
            key = (NUMBER[micro_batch.stage], number, layer)
            self._slots.start(key, self._copies(key), self._engines[self.setting.path[micro_batch.stage]], self.version)

    # --- backward ---

    def backward(self, visit: Pass, saved: Saved, dx_ND: Tensor) -> None:
        """Gradients of one visit's rows and of all instances that computed them."""
        tables, weights = visit.tables, self.weights[visit.where.layer]
        instances = self.instances(visit, Direction.BACKWARD)
        first_flash = tables.num_homes + tables.num_standing
        flash_row = sum(tables.instance_sizes[:first_flash])
        learns = weights.learns
        start = perf_counter()
        if len(instances) > first_flash or (learns and self._sources is not None and visit.micro_batch is not None):
            self._flash_backward(visit, saved, dx_ND, instances, first_flash, flash_row, learns=learns)
        wanted: list[ExpertParts | None] = [None] * first_flash
        if learns:
            self.gradients_under_way |= self._sources is not None
            wanted = [*self._home_gradients(weights)]
            if self._sources is not None and visit.micro_batch is not None:
                wanted += self._sources.standing.parts(visit.where.layer)[1]
        of_others = slice(0, flash_row)
        expert_math.backward(
            self.activation, _part(saved, of_others), tables.instance_sizes[:first_flash],
            instances[:first_flash], wanted, dx_ND[of_others],
        )  # fmt: skip
        self.recorder.add(
            Kind.EXPERTS,
            Resource.COMPUTE,
            visit.where,
            Direction.BACKWARD,
            start,
            perf_counter(),
            tokens=tables.num_rows,
        )

    def _flash_backward(
        self, visit: Pass, saved: Saved, dx_ND: Tensor, instances: list[ExpertParts],
        first_flash: int, flash_row: int, *, learns: bool,
    ) -> None:  # fmt: skip
        """Gradients of flash copies, sent on their way home."""
        assert visit.micro_batch is not None
        stage = visit.micro_batch.stage
        copies = self._copies((NUMBER[stage], visit.micro_batch.number, visit.where.layer))
        engine = self._engines[self.setting.path[stage]]
        wanted: list[ExpertParts | None] = [None] * (len(instances) - first_flash)
        if learns:
            self.finish_returns()
            wanted = [*self.weights[visit.where.layer].layout.experts(engine.gradient_slots(copies))]
        of_flash = slice(flash_row, None)
        expert_math.backward(
            self.activation, _part(saved, of_flash), visit.tables.instance_sizes[first_flash:],
            instances[first_flash:], wanted, dx_ND[of_flash],
        )  # fmt: skip
        if learns:
            self._returning = engine.give_back(copies)
            self._returned_from = (visit.where, copies, perf_counter())

    def _home_gradients(self, weights: ExpertWeights) -> list[ExpertParts]:
        """Views of the gradients of the experts at home: sums go straight into them."""
        every = {}
        for name in weights.names:
            parameter = weights.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=weights.gradient_dtype)
            every[name] = parameter.grad.unbind(0)
        return [ExpertParts.named({name: every[name][i] for name in every}) for i in range(weights.experts.size)]

    def finish_returns(self) -> None:
        """Until the gradients of flash copies that are on their way have been added."""
        if self._returning is not None:
            returning, self._returning = self._returning, None
            returning.wait()
            where, copies, started = self._returned_from
            self.recorder.moved(Kind.FLASH_GRADIENT, Resource.COPY_ENGINE, where, started, copies.held_expert,
                                copies.held_origin, num_bytes=self._row_bytes(gradient=True))  # fmt: skip

    def finish_gradients(self) -> None:
        """Gradients of all copies home, and summed over data-parallel groups: what the optimizer must see."""
        self.finish_returns()
        start = perf_counter()
        if self._sources is not None:
            standing = self._sources.standing
            standing.give_back()
            for layer, experts, homes in standing.held():
                self.recorder.moved(Kind.STANDING_GRADIENT, Resource.NIC, _of_step(layer), start, experts, homes,
                                    num_bytes=self._row_bytes(gradient=True))  # fmt: skip
        self.gradients_under_way = False
        if self.group.num_groups > 1:
            start = perf_counter()
            self._sum_over_replicas()
            self.recorder.add(Kind.REDUCE, Resource.NIC, _of_step(-1), Direction.BACKWARD, start, perf_counter())

    def _sum_over_replicas(self) -> None:
        """All groups take part, also those that had no micro-batch."""
        sums = []
        for weights in self.weights:
            for part in weights.parts():
                if part.requires_grad:
                    if part.grad is None:
                        part.grad = torch.zeros_like(part, dtype=weights.gradient_dtype)
                    what = "summing experts' gradients over data-parallel groups"
                    sums.append(self.group.sum(Channel.REPLICAS, part.grad, what=what))
        for under_way in sums:
            under_way.wait()

    def memory_bytes(self) -> dict[str, int]:
        """What copies take on this rank."""
        slots = self._slots.num_bytes if self._slots is not None else 0
        standing = self._sources.standing.num_bytes if self._sources is not None else 0
        return {"spare_slots": slots, "standing_copies": standing}

    def close(self) -> None:
        """Give back threads and shared memory."""
        for engine in self._engines.values():
            engine.close()
        self._engines = {}


def _part(saved: Saved, rows: slice) -> Saved:
    rows_ND, h, dy_ND = saved
    return rows_ND[rows], h[rows], dy_ND[rows]


def _of_step(layer: int) -> Where:
    """What happens once a step."""
    return Where(stage=StageNumber.UPDATE, micro_batch=-1, layer=layer)


def homes_of(placement: Placement, layer: int, rank: int) -> Sequence[int]:
    """Experts at home on a rank, by number."""
    return np.flatnonzero(placement.home_of_expert[layer] == rank).tolist()
