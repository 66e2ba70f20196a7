"""The visits of one layer, taken in the order of micro-batches.

Forward passes take visits in order; so do forwards that backward repeats (activation recompute), with a count of their
own. Frameworks with micro-batches in flight (1F1B, interleaved) repeat them in order. Elsewhere only the last forward
may be repeated, since the order of several would be unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equilibra.core.errors import ExecuteError
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.record import direction_now
from equilibra.integrations.planned import SlotTable

__all__ = ["LayerVisits"]


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
