"""The visits of one layer in the order of micro-batches: which one a forward is of, also one that backward repeats.

Forward takes the next visit, and so does every forward that backward repeats (activation recompute), from the start.
Where a framework has micro-batches in flight (1F1B, interleaved), each layer sees them in order, forward and again.
Where it has not, only the last forward can be repeated: several at once would come in an order that nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.core.visit import CopyList
from equilibra.events.schema import Direction
from equilibra.execute.group import Channel, ExpertGroup, Pending
from equilibra.execute.record import direction_now
from equilibra.integrations.planned import SlotTable

__all__ = ["Arriving", "LayerVisits", "exchange", "sum_copies"]

# Copies of a visit between their homes and the ranks that hold them, a line of numbers per copy.
#
# Lines travel over all ranks of the expert-parallel group, by origin and expert there, by holding rank and expert
# home.
# Gradients of one expert's copies are added in the order of the ranks that hold them, in at least float32.


class Arriving(NamedTuple):
    """Lines on their way."""

    parts: list[Tensor]
    """[lines, ...] each, once they are waited for"""
    pending: list[Pending]

    def wait(self) -> list[Tensor]:
        """The lines of every part."""
        for one in self.pending:
            one.wait()
        return self.parts


def exchange(group: ExpertGroup, copies: CopyList, parts: Sequence[Tensor], *, home: bool) -> Arriving:
    """Collective: weights of every part [lines, ...] to the holders, or gradients home. All parts go at once."""
    channel = Channel.GRADIENTS if home else Channel.COPIES
    sizes, received_sizes = copies.served_sizes, copies.held_sizes
    if home:
        sizes, received_sizes = received_sizes, sizes
    what = f"{'returning gradients of' if home else 'fetching'} copies of MoE layer {copies.layer}"
    received = [part.new_empty(sum(received_sizes), *part.shape[1:]) for part in parts]
    return Arriving(received, [
        group.all_to_all(channel, sent.contiguous(), sizes, into, received_sizes, what=what)
        for sent, into in zip(parts, received, strict=True)
    ])  # fmt: skip


def sum_copies(lines: Tensor, served: Sequence[int]) -> dict[int, Tensor]:
    """By home slot, the sum over the lines of its copies. served: the slot of each line."""
    wide = torch.promote_types(lines.dtype, torch.float32)
    totals = {slot: lines.new_zeros(lines.shape[1:], dtype=wide) for slot in sorted(set(served))}
    for line, slot in zip(lines, served, strict=True):
        totals[slot] += line
    return totals


class LayerVisits:
    """One layer's part in a plan."""

    def __init__(self, layer: int, group: ExpertGroup, *, num_homes: int, in_flight: bool) -> None:
        self.layer, self.group, self.num_homes = layer, group, num_homes
        self.in_flight = in_flight
        """whether several micro-batches may be between forward and backward"""
        self.current: SlotTable | None = None
        """of the forward that is under way; None: no step is armed"""
        self.number = -1
        """of that visit, among those that are armed"""
        self._visits: Sequence[Callable[[], SlotTable]] | None = None
        self._made: dict[int, SlotTable] = {}
        self._begun = dict.fromkeys((Direction.FORWARD, Direction.FORWARD_AGAIN), 0)

    def arm(self, visits: Sequence[Callable[[], SlotTable]] | None) -> None:
        """The visits of a step in order; None: no step."""
        self._visits, self._made, self.current, self.number = visits, {}, None, -1
        self._begun = dict.fromkeys(self._begun, 0)

    @property
    def num_done(self) -> int:
        """Forward passes since a step was armed."""
        return 0 if self._visits is None else self._begun[Direction.FORWARD]

    def take(self) -> SlotTable | None:
        """The visit of the forward that begins; None: no step is armed."""
        direction, begun = direction_now(), self._begun[Direction.FORWARD]
        number, again = self._begun[direction], direction is Direction.FORWARD_AGAIN
        if self._visits is None:
            if again and not begun and not self.in_flight:
                raise ExecuteError(
                    f"activations of MoE layer {self.layer} are computed anew for a planned pass after its end(): "
                    "call end() when backward is through"
                )
        elif again and not self.in_flight and number != begun - 1:
            raise ExecuteError(
                f"activations of MoE layer {self.layer} are computed anew for micro-batch {number + 1} when {begun} "
                "have begun: with activation checkpointing run backward of each micro-batch, once, before the next "
                "forward"
            )
        elif number >= (begun if again else len(self._visits)):
            raise ExecuteError(
                f"{'recompute' if again else 'forward'} {number + 1} of MoE layer {self.layer} has no plan: the step "
                f"has {len(self._visits)} micro-batches, {begun} have begun; give all of them to begin(), arm() the "
                "step again for another pass, or end() it for passes that are not planned"
            )
        self._begun[direction] += 1
        self.number = number
        return self._visit(number)

    def _visit(self, number: int) -> SlotTable | None:
        """A visit that is armed, made once; None: there is none."""
        if self._visits is None or number >= len(self._visits):
            return None
        if number not in self._made:
            self._made[number] = self._visits[number]()
        return self._made[number]
