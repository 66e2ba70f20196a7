"""What a balanced layer adds to Megatron's: pairs go to slots, and copies run beside the experts.

Symbols: T tokens, E experts, P slots of all ranks, R rows that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.plan import Stage
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.micro_batch import to_device
from equilibra.execute.record import direction_now
from equilibra.integrations.executor.balancer import LayerVisits
from equilibra.integrations.megatron.copies import CopiesOfVisit, MegatronExperts, SharedCopies, carry, opened
from equilibra.integrations.planned import SlotCounts, SlotTable


class MegatronVisits(LayerVisits):
    """The armed visits of one layer. Any number of micro-batches may be in flight."""

    def __init__(
        self, layer: int, group: ExpertGroup, experts: nn.Module, template: nn.Module | None, counts: SlotCounts
    ) -> None:
        self.homes = MegatronExperts(experts, layer)
        super().__init__(layer, group, num_homes=len(self.homes.parts), in_flight=True)
        self.template, self.counts = template, counts
        """experts of the copy slots, without weights; None if there are no copy slots"""
        self.shared: SharedCopies | None = None
        """the copies of all layers"""
        self.deferred = False
        """whether buckets of DDP wait for gradients of copies, so that the layer need not"""
        self.num_ahead, self.num_late = 0, 0
        """visits whose flash copies were requested before their layer began, and visits whose were not"""
        self.moved = False
        """whether any expert of any layer is not where plain Megatron puts it"""
        self.live: Callable[[int, Tensor], SlotTable] | None = None
        """makes the table of a forward from this rank's counts [E]; None: forwards are planned ahead"""
        self.fixed: SlotTable | None = None
        """the table of all forwards of a step, where those are not planned one by one"""
        self.without_plan: SlotTable | None = None
        """homes only, used while no step is armed"""

    def next_key(self, direction: Direction) -> VisitKey | None:
        """The visit that comes next in this direction; None if it is not known yet."""
        slots = self.fixed or self._visit(self._begun[direction])
        return None if slots is None else slots.key

    # --- a forward ---

    def to_slots(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a forward: the router's probabilities and map, over slots instead of experts."""
        slots = self.live(self.layer, map_TE.sum(dim=0)) if self.live is not None else self.take() or self.without_plan
        assert slots is not None
        self.current = slots
        self._request(slots)
        return to_slots(probs_TE, map_TE, slots)

    def _request(self, slots: SlotTable) -> None:
        """Collective: start to fetch the copies of the forward that begins, unless they are on their way."""
        if slots.key.micro_batch < 0:
            return
        assert self.shared is not None
        copies = self.shared.offered()
        copies.lists[slots.key] = slots.flash
        if slots.flash.num_in_node:
            there = copies.has(slots.key)
            self.num_ahead, self.num_late = self.num_ahead + there, self.num_late + (not there)
        copies.start(slots.key)
        if self.live is not None:  # the next layer's plan is not known yet, but its standing copies are
            copies.standing.start(self.layer + 1)

    def run(self, homes: Callable[..., Any], rows_RD: Tensor, count_of_slot: Tensor, probs_R: Tensor) -> Any:  # noqa: ANN401
        """Run homes and copies on rows ordered by slot. homes: the experts' own forward."""
        slots, at = self.current, self.num_homes
        assert slots is not None
        if slots.key.micro_batch < 0:
            return homes(rows_RD, count_of_slot[:at], probs_R)
        assert self.shared is not None
        visit = CopiesOfVisit(self.shared, slots, self.homes, deferred=self.deferred)
        visit.take(direction_now())
        held: list[Any] = []
        if visit.any_in_reach:
            rows_RD, probs_R, standing, flash = carry(visit, rows_RD, probs_R)
            held = [*standing, *[None] * (self.counts.standing - len(standing)), *flash]
            held += [None] * (self.counts.num - len(held))
        if not any(held):
            out, bias = homes(rows_RD, count_of_slot[:at], probs_R)
        else:
            num = int(count_of_slot[:at].sum())
            out, bias = homes(rows_RD[:num], count_of_slot[:at], probs_R[:num])
            more = visit.run(self.template, held, rows_RD[num:], count_of_slot[at:], probs_R[num:])
            out = torch.cat([out, more])
        return opened(visit, out, self._begin_backward), bias

    def _begin_backward(self) -> None:
        self._begun[Direction.BACKWARD] += 1


def to_slots(probs_TE: Tensor, map_TE: Tensor, slots: SlotTable) -> tuple[Tensor, Tensor]:
    """[T, P] probabilities and map: each pair in exactly one slot of its expert. Reads nothing from the device."""
    expert, first, end = (
        to_device(values, map_TE.device) for values in (slots.expert_of_slot, slots.first_of_slot, slots.end_of_slot)
    )
    number_TE = map_TE.cumsum(dim=0) - 1
    if slots.scale:
        count_P = map_TE.sum(dim=0).index_select(0, expert)
        first, end = first * count_P // slots.scale, end * count_P // slots.scale
    number_TP = number_TE.index_select(1, expert)
    map_TP = map_TE.index_select(1, expert) & (number_TP >= first) & (number_TP < end)
    return probs_TE.index_select(1, expert) * map_TP, map_TP


class Ahead:
    """Predicts the next visit of a pipeline stage, separately for each stage of the step, to prefetch its copies.

    The order depends on Megatron's schedule (1F1B, interleaved) and on activation recompute, so it is learned: a pass
    is expected to run as the last one did, and where it differs, what followed a layer last time follows again. Ranks
    of an expert-parallel group run layers in the same order, so they fetch the same copies in the same order. A wrong
    prediction costs time only: a layer without prefetched copies fetches its own.
    """

    def __init__(self, layers: Sequence[MegatronVisits]) -> None:
        self._layers = layers
        self._last_pass: dict[Stage, list[tuple[Direction, int]]] = {}
        self._after: dict[tuple[Stage, Direction, int], tuple[Direction, int]] = {}
        self._stage, self._pass = Stage.UPDATE, list[tuple[Direction, int]]()

    def arm(self, stage: Stage) -> None:
        """Begin a pass. Nothing is fetched for its first layer: weights may still be loaded before it runs."""
        if self._pass:
            self._last_pass[self._stage] = self._pass
        self._stage, self._pass = stage, []

    def __call__(self, key: VisitKey, direction: Direction) -> list[VisitKey]:
        """Note that a layer runs; the visit that is expected next, if any."""
        now, at, expected = (direction, key.layer), len(self._pass), self._last_pass.get(self._stage, [])
        if self._pass:
            self._after[self._stage, *self._pass[-1]] = now
        self._pass.append(now)
        if at + 1 < len(expected) and expected[at] == now:
            following: tuple[Direction, int] | None = expected[at + 1]
        else:
            following = self._after.get((self._stage, *now))
        found = None if following is None else self._layers[following[1]].next_key(following[0])
        return [] if found is None else [found]
