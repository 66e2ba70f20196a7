"""What a balanced layer does besides Megatron: pairs to slots, copies to experts, one visit after another.

Symbols: T tokens, E experts, P slots of all ranks, R rows that this rank computes.

Visits are a queue: forward takes the next one, and so does every forward that backward repeats (recompute), from the
start. So micro-batches may be in flight in any number (1F1B, interleaved), as long as each layer sees them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.record import direction_now
from equilibra.integrations.megatron.ahead import Ahead
from equilibra.integrations.megatron.copies import Arriving, Exchange, carry, fetch
from equilibra.integrations.megatron.parts import parts_of, run_copies
from equilibra.integrations.planned.slots import SlotTable

__all__ = ["Place", "to_slots"]


class Place:
    """One layer's part in a plan."""

    def __init__(
        self, layer: int, group: ExpertGroup, experts: nn.Module, template: nn.Module | None, *, fused: bool
    ) -> None:
        self.layer, self.group, self.fused = layer, group, fused
        self.parts = parts_of(experts)
        self.template = template
        """experts of the copy slots, without weights; None: there are no copy slots"""
        self.num_homes = len(self.parts)
        dtypes = {part.dtype for one in self.parts for part in one.values()}
        if len(dtypes) != 1:
            raise InputError(f"weights of the experts of MoE layer {layer} must be of one type, not {dtypes}")
        (self.dtype,) = dtypes
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
        self.current: SlotTable | None = None
        """of the forward that is under way"""
        self._visits: list[Callable[[], SlotTable]] | None = None
        self._made: dict[int, SlotTable] = {}
        self._next = {Direction.FORWARD: 0, Direction.FORWARD_AGAIN: 0}
        self._arriving: dict[tuple[Direction, int], Arriving] = {}
        """copies of visits that lie ahead"""
        self._arrived: Arriving | None = None
        """copies of the forward that is under way"""

    def arm(self, visits: list[Callable[[], SlotTable]] | None) -> list[Arriving]:
        """The micro-batches of a step in order; None: no step. Returns what nobody will use, to be waited for."""
        self._visits, self._made = visits, {}
        self._next = dict.fromkeys(self._next, 0)
        left = [*self._arriving.values(), *([self._arrived] if self._arrived else [])]
        self._arriving, self._arrived = {}, None
        return left

    @property
    def num_done(self) -> int:
        """Forward passes since it was armed."""
        return self._next[Direction.FORWARD]

    def take(self) -> SlotTable:
        """The visit of the forward that begins."""
        direction = direction_now()
        if self._visits is None:
            assert self.without_plan is not None
            return self.without_plan
        number = self._next[direction]
        limit = len(self._visits) if direction is Direction.FORWARD else self._next[Direction.FORWARD]
        if number >= limit:
            what = "forward" if direction is Direction.FORWARD else "recompute"
            raise ExecuteError(
                f"{what} {number + 1} of MoE layer {self.layer} has no plan: the step has {len(self._visits)} "
                f"micro-batches, {self._next[Direction.FORWARD]} have begun; give all of them to begin(), arm() the "
                "step again for another pass, or end() it for passes that are not planned"
            )
        self._next[direction] += 1
        return self._visit(number)

    def _visit(self, number: int) -> SlotTable:
        assert self._visits is not None
        if number not in self._made:
            self._made[number] = self._visits[number]()
        return self._made[number]

    # --- copies ahead ---

    @property
    def num_arriving(self) -> int:
        """Visits that lie ahead, whose copies were asked for."""
        return len(self._arriving)

    def fetch_next(self, direction: Direction) -> None:
        """Collective: start to fetch the copies of the next visit, if there is one and they have not been asked for."""
        number = self._next[direction]
        if self._visits is None or number >= len(self._visits) or (direction, number) in self._arriving:
            return
        visit = self._visit(number)
        if visit.num_copies:
            self._arriving[direction, number] = fetch(self._exchange(visit), self._copied(visit))

    def _begin_copies(self, visit: SlotTable, direction: Direction) -> None:
        """Copies of this visit are on their way from here on, and those of the next layer's."""
        if self.ahead is None or self._visits is None:
            return
        self._arrived = self._arriving.pop((direction, self._next[direction] - 1), None)
        if self._arrived is not None:
            self.num_ahead += 1
        elif visit.num_copies:
            self.num_late += 1
            self._arrived = fetch(self._exchange(visit), self._copied(visit))
        self.ahead.began(self.layer, direction)

    def _take_copies(self, visit: SlotTable) -> Arriving:
        """Those that are on their way; nothing here holds their buffers any longer."""
        arriving, self._arrived = self._arrived, None
        return arriving or fetch(self._exchange(visit), self._copied(visit))

    def _exchange(self, visit: SlotTable) -> Exchange:
        first = next(iter(self.parts[0].values()))
        return Exchange(
            group=self.group, visit=visit, layer=self.layer, fused=self.fused, served_slots=sorted(set(visit.served)),
            part_shapes=[part.shape for part in self.parts[0].values()], dtype=self.dtype, device=first.device,
        )  # fmt: skip

    def _copied(self, visit: SlotTable) -> list[nn.Parameter]:
        return [part for slot in sorted(set(visit.served)) for part in self.parts[slot].values()]

    # --- a forward ---

    def to_slots(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a forward: probabilities and map of the router over slots instead of experts."""
        self.current = self.take()
        self._begin_copies(self.current, direction_now())
        return to_slots(probs_TE, map_TE, self.current)

    def run(self, homes: Callable[..., Any], rows_RD: Tensor, count_of_slot: Tensor, probs_R: Tensor) -> Any:  # noqa: ANN401
        """Experts and copies on their rows, which are in the order of slots. homes: the experts' own forward."""
        visit, at = self.current, self.num_homes
        assert visit is not None
        copies: list[list[Tensor]] = []
        if visit.num_copies:
            rows_RD, probs_R, copies = carry(self._take_copies(visit), rows_RD, probs_R, self._copied(visit))
        if not copies:
            return homes(rows_RD, count_of_slot[:at], probs_R)
        num = int(count_of_slot[:at].sum())
        out, bias = homes(rows_RD[:num], count_of_slot[:at], probs_R[:num])
        more = run_copies(self.template, copies, rows_RD[num:], count_of_slot[at:], probs_R[num:])
        return torch.cat([out, more]), bias


def to_slots(probs_TE: Tensor, map_TE: Tensor, visit: SlotTable) -> tuple[Tensor, Tensor]:
    """[T, P] both: every pair in exactly one of its expert's slots. No sizes are read from the device."""
    expert, first, end = (
        _to(values, map_TE.device) for values in (visit.expert_of_slot, visit.first_of_slot, visit.end_of_slot)
    )
    number_TE = map_TE.cumsum(dim=0) - 1
    number_TP = number_TE.index_select(1, expert)
    map_TP = map_TE.index_select(1, expert) & (number_TP >= first) & (number_TP < end)
    return probs_TE.index_select(1, expert) * map_TP, map_TP


def _to(values: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
