"""Copies of a visit between their homes and the ranks that hold them, a line of numbers per copy.

Lines travel over all ranks of the expert-parallel group, by origin and expert there, by holding rank and expert home.
Gradients of one expert's copies are added in the order of the ranks that hold them, in at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equilibra.core.visit import CopyList
from equilibra.execute.group import Channel, ExpertGroup, Pending

__all__ = ["Arriving", "exchange", "sum_copies"]


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
