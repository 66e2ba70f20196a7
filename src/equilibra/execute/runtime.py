"""Runtime: what a model's MoE layers share on this rank: the armed plan, the running micro-batch, the weight version.

Layers ask it for tables and instances; the Balancer arms it.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from equilibra.core.errors import BrokenStateError, InputError
from equilibra.core.placement import Placement
from equilibra.core.plan import GroupPlan
from equilibra.core.visit import Visit, VisitKey, only_homes, signed_ids
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.copies.copies import Copies, CopySetting
from equilibra.execute.experts import MoESpec, expert_math
from equilibra.execute.experts.weights import ExpertWeights, refuse_wrappers
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.kernels import ExpertGradients, ExpertParts, RowWeights
from equilibra.execute.micro_batch import MicroBatch, Tables, on_device
from equilibra.execute.record import Recorder, direction_now

__all__ = ["CopySetting", "Runtime"]

MEMORY = ("spare_slots", "standing_copies", "transfers")
Saved = tuple[Tensor, Tensor, Tensor]
"""rows [N, D], first product [N, 2F] and gradient of the results [N, D]"""


class Runtime:
    """State shared by a model's MoE layers on one rank."""

    def __init__(self, group: ExpertGroup, placement: Placement, setting: CopySetting | None = None) -> None:
        if placement.cluster != group.cluster or not placement.is_even():
            raise InputError(
                f"every rank of {group.cluster} must have the same number of homes; the placement has "
                f"{placement.num_homes().min()} to {placement.num_homes().max()} per rank on {placement.cluster}"
            )
        self.group, self.placement = group, placement
        self.setting = setting or CopySetting()
        self.weights: list[ExpertWeights] = []
        """by layer"""
        self.current: MicroBatch | None = None
        """the running micro-batch"""
        self.version = 0
        """counts changes of the weights"""
        self.recorder = Recorder(group.rank, finish=group.watch.finish)
        self.gradients_under_way = False
        """whether copies may hold gradients that have not returned"""
        self.masters: Mapping[nn.Parameter, nn.Parameter] = {}
        """float32 masters, which hold the gradients once those are summed (see `steps.masters`)"""
        self.broken: str | None = None
        """why the state in memory must not be used"""
        self.most_table_bytes = 0
        """peak memory of a micro-batch's routing and tables since the plan was armed"""
        self.armed: GroupPlan | None = None
        """the plan under execution"""
        self._copies: Copies | None = None

    # --- set up ---

    def register(self, weights: ExpertWeights) -> int:
        """Add a layer and return its number."""
        if self.weights and weights.spec.part_shapes() != self.weights[0].spec.part_shapes():
            raise InputError("cannot add this MoE layer: experts of all layers need equal shapes to share spare slots")
        refuse_wrappers()
        self.weights.append(weights)
        return len(self.weights) - 1

    @property
    def spec(self) -> MoESpec:
        return self.weights[0].spec

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that computes the experts; None on the host."""
        device = self.weights[0].device if self.weights else None
        return device if device is not None and device.type == "cuda" else None

    # --- plans ---

    def arm(self, armed: GroupPlan) -> None:
        """Collective: execute this plan from now on; homes must have moved already."""
        if armed.plan.placement != self.placement:
            raise InputError("cannot execute a plan before its homes have moved: begin the step with Balancer.begin()")
        armed.plan.check(armed.load, spare_slots=self.setting.spare_slots)
        self.bring_gradients_home()
        if self._copies is not None and not self._copies.fits():
            self._copies.close()
            self._copies = None
        if self._copies is None:
            text = f"{self.setting} {self.spec} {self.weights[0].dtype} {len(self.weights)}"
            self.group.agree(
                f"settings {sha256(text.encode()).hexdigest()[:16]}: {text}",
                what="how copies are kept and what experts are",
            )
            self._copies = Copies(self.group, self.weights, self.setting, self.recorder)
        self._copies.arm(armed)
        self.armed, self.most_table_bytes = armed, 0
        self._offer_weights()

    def check_whole(self, asked: str = "") -> None:
        """Raise BrokenStateError if an interrupted load or move left mixed state; asked: what cannot be done then."""
        if self.broken is not None:
            raise BrokenStateError(f"cannot {asked}: {self.broken}" if asked else self.broken)

    def disarm(self) -> None:
        """Return gradients of copies and drop the plan; tokens are then routed live to homes."""
        self.bring_gradients_home()
        if self._copies is not None:
            self._copies.forget()
        self.armed = None

    def weights_changed(self) -> None:
        """Collective, after weights changed: drop all copies and publish the new weights."""
        if self._copies is not None:
            self._copies.forget()
        self.version += 1
        self._offer_weights()

    def _offer_weights(self) -> None:
        for weights in self.weights:
            weights.note_version()
        if self.armed is not None and self._copies is not None:
            self._copies.offer(self.version)

    def __deepcopy__(self, _memo: dict[int, object]) -> Runtime:
        raise InputError(
            "cannot deepcopy a model with BalancedMoE layers: they share process groups and copies; build a second "
            "model with its own Runtime and load the same checkpoint (also for a reference policy)"
        )

    # --- visits ---

    def enter_layer(self, key: VisitKey, direction: Direction) -> None:
        """Note the start of a layer; the time since the last one goes to attention and other dense parts."""
        self.check_whole()
        if self.current is None and direction is Direction.FORWARD_AGAIN:
            raise InputError(
                "cannot recompute activations outside of `with micro_batch:`: run the backward pass inside it"
            )
        since = self.recorder.dense_since
        if since is not None:
            self.recorder.add(Kind.ATTENTION, Resource.COMPUTE, key, direction, since, self.recorder.now())
        self.recorder.dense_since = None

    def leave_layer(self) -> None:
        self.recorder.dense_since = self.recorder.now()

    def key(self, layer: int) -> VisitKey:
        """The visit of a layer in the running micro-batch."""
        return VisitKey.once(layer) if self.current is None else self.current.key(layer)

    def tables(self, layer: int, experts_TK: Tensor) -> Tables:
        """Where this layer's rows go: from the plan if it covers them, else from counts that ranks exchange."""
        micro_batch, armed = self.current, self.armed
        if micro_batch is None or armed is None:
            return self._counted_tables(only_homes(self.placement, self.key(layer)), experts_TK)
        visit = armed.plan.visit(*micro_batch.key(layer))
        if micro_batch.planned:
            return micro_batch.tables(layer, lambda: self._planned_tables(visit, micro_batch, armed))
        return self._counted_tables(visit, experts_TK)

    def _planned_tables(self, visit: Visit, micro_batch: MicroBatch, armed: GroupPlan) -> Tables:
        rank, layer = self.group.rank, visit.key.layer
        sent = visit.send_table(micro_batch.experts_TLK[:, layer], rank)
        received = visit.receive_table(rank, visit.counts(armed.load, rank))
        return on_device(visit, sent, received, rank, self.weights[layer].device)

    def _counted_tables(self, visit: Visit, experts_TK: Tensor) -> Tables:
        """Every source tells every rank how many rows its instances get."""
        group, rank, layer = self.group, self.group.rank, visit.key.layer
        narrow: torch.dtype = getattr(torch, signed_ids(self.placement.num_experts).name)
        sent = visit.send_table(experts_TK.to(narrow).cpu().numpy(), rank)
        experts_of_rank = [visit.on_rank(r) for r in range(group.num_ranks)]
        mine = experts_of_rank[rank]
        told = torch.from_numpy(np.concatenate([sent.counts_RE[r, of] for r, of in enumerate(experts_of_rank)]))
        told = told.to(experts_TK.device)  # NCCL needs device memory
        heard = told.new_empty(mine.size * group.num_ranks)
        with self.recorder.span(Kind.COUNTS, Resource.NVLINK, visit.key, direction_now()):
            group.all_to_all(
                Channel.DISPATCH, told, [of.size for of in experts_of_rank], heard, [mine.size] * group.num_ranks,
                what=f"exchanging counts of MoE layer {layer}",
            ).wait()  # fmt: skip
        on_host = heard.cpu()
        group.watch.check(f"exchanging counts of MoE layer {layer}")  # invalid if a rank was lost
        counts_IR = on_host.view(group.num_ranks, mine.size).numpy().T.astype(np.int64)
        return on_device(visit, sent, visit.receive_table(rank, counts_IR), rank, self.weights[layer].device)

    # --- instances ---

    def instances(self, key: VisitKey, direction: Direction) -> list[ExpertParts]:
        """Wait for a visit's homes, standing and flash copies; prefetch those of the next visits.

        Hidden from selective checkpointing, which counts operations: a fetch is not repeated in recompute.
        """
        with _disable_current_modes():
            weights, copies = self.weights[key.layer], self._copies_of(key)
            weights.check_version(key.layer)
            homes = weights.homes(keep=self.current is not None)
            return homes + (copies.take(key, direction) if copies is not None else [])

    def _copies_of(self, key: VisitKey) -> Copies | None:
        """The copies, if the visit belongs to a planned micro-batch."""
        return self._copies if self.armed is not None and key.micro_batch >= 0 else None

    # --- backward ---

    def backward(self, tables: Tables, saved: Saved, dx_ND: Tensor, weighted: RowWeights) -> None:
        """Compute gradients of a visit's rows and instances, and start returning those of flash copies."""
        key = tables.visit.key
        weights, copies = self.weights[key.layer], self._copies_of(key)
        instances = self.instances(key, Direction.BACKWARD)
        num_kept = tables.num_homes + tables.num_standing
        start = self.recorder.now()
        wanted: list[ExpertParts | ExpertGradients | None] = [None] * len(instances)
        if copies is not None and weights.learns:
            self.gradients_under_way = True
            wanted[num_kept:] = copies.flash_gradients(key)
            wanted[tables.num_homes : num_kept] = copies.standing.parts(key.layer)[1]
        num_first = 0 if weights.has_gradients else tables.num_homes
        if weights.learns:
            wanted[: tables.num_homes] = weights.home_gradients(empty=num_first > 0)

        def send() -> None:
            if copies is not None and weights.learns:
                copies.send_gradients(key)

        try:
            expert_math.backward(
                self.spec.activation, saved, tables.instance_sizes, instances, wanted, dx_ND, weighted=weighted,
                num_first=num_first, num_last=len(instances) - num_kept, after_last=send,
            )  # fmt: skip
        except BaseException:
            if num_first:  # uninitialised memory must not pass for a gradient
                weights.drop_gradients()
            raise
        self.recorder.add(
            Kind.EXPERTS, Resource.COMPUTE, key, Direction.BACKWARD, start, self.recorder.now(),
            tokens=tables.num_rows,
        )  # fmt: skip

    def finish_gradients(self) -> None:
        """Collective: return gradients of all copies and sum over data-parallel groups, before the optimizer."""
        self.check_whole()
        self.bring_gradients_home()
        if self.group.num_groups > 1:
            start = self.recorder.now()
            what = "summing experts' gradients over data-parallel groups"
            sums = [
                self.group.sum(Channel.REPLICAS, gradient, what=what)
                for weights in self.weights
                for name in weights.names
                if (gradient := weights.gradient_of(name)) is not None
            ]
            for under_way in sums:
                under_way.wait()
            self.recorder.add(
                Kind.REDUCE, Resource.NIC, VisitKey.once(), Direction.BACKWARD, start, self.recorder.now()
            )

    def bring_gradients_home(self) -> None:
        """Collective: add gradients of copies to their homes'."""
        if self._copies is not None and self.armed is not None:
            self._copies.finish_returns()
            self._copies.return_standing()
            self._copies.finish_reads()
        self.gradients_under_way = False

    def discard_gradients(self) -> None:
        """Drop the gradients of experts, including those of copies."""
        if self._copies is not None and self.armed is not None:
            self._copies.finish_returns()
            self._copies.standing.gradients_CP.zero_()
        for weights in self.weights:
            weights.drop_gradients()
        self.gradients_under_way = False

    def memory_bytes(self) -> dict[str, int]:
        copies = self._copies.memory_bytes() if self._copies is not None else dict.fromkeys(MEMORY, 0)
        return {**copies, "tables": self.most_table_bytes}

    def release(self) -> None:
        """Collective, before weights leave the device: free copies and other ranks' memory until the next plan."""
        self.disarm()
        self.close()
        self.group.barrier(what="releasing copies")
        if self.gpu is not None:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = self.armed = None
