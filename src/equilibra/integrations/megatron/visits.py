"""What a balanced layer does besides Megatron: pairs to slots, copies to experts.

Symbols: T tokens, E experts, P slots of all ranks, R rows that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.micro_batch import to_device
from equilibra.execute.record import direction_now
from equilibra.integrations.executor.visits import LayerVisits
from equilibra.integrations.megatron.copies import Fetched, Packing, carry, fetch, parts_of, run_copies
from equilibra.integrations.planned import SlotTable

__all__ = ["MOST_LAYERS", "Ahead", "MegatronVisits", "to_slots"]


class MegatronVisits(LayerVisits):
    """One layer's part in a plan. Micro-batches may be in flight in any number."""

    def __init__(
        self, layer: int, group: ExpertGroup, experts: nn.Module, template: nn.Module | None, *, fused: bool
    ) -> None:
        self.parts = parts_of(experts)
        super().__init__(layer, group, num_homes=len(self.parts), in_flight=True)
        self.template = template
        """experts of the copy slots, without weights; None: there are no copy slots"""
        dtypes = {part.dtype for one in self.parts for part in one.values()}
        if len(dtypes) != 1:
            raise InputError(f"weights of the experts of MoE layer {layer} must be of one type, not {dtypes}")
        (self.dtype,) = dtypes
        self._fused = fused
        self.ahead: Ahead | None = None
        """guesses which layer comes next; None: copies are fetched when they are used"""
        self.num_ahead, self.num_late = 0, 0
        """visits with copies so far that were on their way before their layer began, or were not"""
        self.expert_of_home: list[int] = []
        """[H] logical numbers"""
        self.moved = False
        """whether any expert of any layer is elsewhere than plain Megatron has it"""
        self.without_plan: SlotTable | None = None
        """only homes: what is done when no step is armed"""
        self._arriving: dict[tuple[Direction, int], Fetched] = {}
        """copies of visits that lie ahead"""
        self._arrived: Fetched | None = None
        """copies of the forward that is under way"""

    def left_over(self) -> list[Fetched]:
        """Copies on their way that nobody will use any more, to be waited for."""
        left = [*self._arriving.values(), *([self._arrived] if self._arrived else [])]
        self._arriving, self._arrived = {}, None
        return left

    # --- copies ahead ---

    @property
    def num_arriving(self) -> int:
        """Visits that lie ahead, whose copies were asked for."""
        return len(self._arriving)

    def fetch_next(self, direction: Direction) -> None:
        """Collective: start to fetch the copies of the next visit, if there is one and they have not been asked for."""
        number = self._begun[direction]
        slots = None if (direction, number) in self._arriving else self._visit(number)
        if slots is not None and slots.num_copies:
            self._arriving[direction, number] = self._fetch(slots)

    def _begin_copies(self, slots: SlotTable, direction: Direction) -> None:
        """Copies of this visit are on their way from here on, and those of the next layer's."""
        if self.ahead is None or self._visits is None:
            return
        self._arrived = self._arriving.pop((direction, self.number), None)
        if self._arrived is not None:
            self.num_ahead += 1
        elif slots.num_copies:
            self.num_late += 1
            self._arrived = self._fetch(slots)
        self.ahead.began(self.layer, direction)

    def _take_copies(self, slots: SlotTable) -> Fetched:
        """Those that are on their way; nothing here holds their buffers any longer."""
        fetched, self._arrived = self._arrived, None
        return fetched or self._fetch(slots)

    def _fetch(self, slots: SlotTable) -> Fetched:
        parts = list(self.parts[0].values())
        packing = Packing(
            group=self.group, part_shapes=[part.shape for part in parts], like=parts[0].detach(), fused=self._fused
        )
        return fetch(packing, slots, self.parts)

    # --- a forward ---

    def to_slots(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a forward: probabilities and map of the router over slots instead of experts."""
        self.current = slots = self.take() or self.without_plan
        assert slots is not None
        self._begin_copies(slots, direction_now())
        return to_slots(probs_TE, map_TE, slots)

    def run(self, homes: Callable[..., Any], rows_RD: Tensor, count_of_slot: Tensor, probs_R: Tensor) -> Any:  # noqa: ANN401
        """Experts and copies on their rows, which are in the order of slots. homes: the experts' own forward."""
        slots, at = self.current, self.num_homes
        assert slots is not None
        copies: list[list[Tensor]] = []
        if slots.num_copies:
            rows_RD, probs_R, copies = carry(self._take_copies(slots), rows_RD, probs_R, self.parts)
        if not copies:
            return homes(rows_RD, count_of_slot[:at], probs_R)
        num = int(count_of_slot[:at].sum())
        out, bias = homes(rows_RD[:num], count_of_slot[:at], probs_R[:num])
        more = run_copies(self.template, copies, rows_RD[num:], count_of_slot[at:], probs_R[num:])
        return torch.cat([out, more]), bias


def to_slots(probs_TE: Tensor, map_TE: Tensor, slots: SlotTable) -> tuple[Tensor, Tensor]:
    """[T, P] both: every pair in exactly one of its expert's slots. No sizes are read from the device."""
    expert, first, end = (
        to_device(values, map_TE.device) for values in (slots.expert_of_slot, slots.first_of_slot, slots.end_of_slot)
    )
    number_TE = map_TE.cumsum(dim=0) - 1
    number_TP = number_TE.index_select(1, expert)
    map_TP = map_TE.index_select(1, expert) & (number_TP >= first) & (number_TP < end)
    return probs_TE.index_select(1, expert) * map_TP, map_TP


MOST_LAYERS = 2
"""whose copies are held for later, at a time: the next one's, and those of a guess whose time has not come"""


class Ahead:
    """What comes after what, by kind of pass; one for the layers of a pipeline stage.

    Which layer comes next is Megatron's business: 1F1B and interleaved schedules, recompute of all layers or of some.
    So it is learned: what came after a layer last time is taken to come after it again. Ranks of an expert-parallel
    group run the same layers in the same order, so they fetch the same copies in the same order. A wrong guess makes
    nothing wrong: copies wait under the layer, direction and micro-batch that they are for; a layer that nobody foresaw
    fetches its own.
    """

    def __init__(self, layers: Sequence[MegatronVisits]) -> None:
        self._layers = layers
        self._after_of_stage: dict[Stage, dict[tuple[Direction, int], tuple[Direction, int]]] = {}
        self.arm(Stage.UPDATE)

    def arm(self, stage: Stage) -> None:
        """A pass begins. Nothing is fetched for its first layer: weights may still be loaded before it runs."""
        self._after = self._after_of_stage.setdefault(stage, {})
        self._last: tuple[Direction, int] | None = None

    def began(self, layer: int, direction: Direction) -> None:
        """Learn that a layer came after the last one, and start to fetch what came after it before."""
        now = direction, layer
        if self._last is not None:
            self._after[self._last] = now
        self._last = now
        following = self._after.get(now)
        if following is not None and sum(one.num_arriving for one in self._layers) < MOST_LAYERS:
            self._layers[following[1]].fetch_next(following[0])
