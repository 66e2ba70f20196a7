"""The moves of one layer: which rows go where, and the exchange that brings them there.

Symbols: H homes on this rank, B bytes of one expert in one tensor, w columns at a time, R ranks, S experts that leave
(as many arrive: every rank has H homes before and after).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import BudgetError
from equilibra.core.placement import Migration
from equilibra.execute.group import Channel, ExpertGroup

__all__ = ["LayerMove", "layer_move", "move_columns", "width_of"]

ALIGNMENT = 16
"""bytes: columns begin at multiples of it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMove:
    """The moves of one layer as one rank sees them. Slots are in the order of experts' numbers, before and after."""

    layer: int
    leaving_slots: list[int]
    """[S] by target rank and expert"""
    sent_sizes: list[int]
    """[R] experts to each rank"""
    arriving_experts: list[int]
    """[S] by the rank they come from and their number"""
    arriving_from: list[int]
    """[S]"""
    arriving_slots: list[int]
    """[S]"""
    received_sizes: list[int]
    """[R] experts from each rank"""
    shifted: list[tuple[int, int]]
    """old and new slot of experts that stay, but elsewhere in the stack"""
    staging_rows: int
    """rows that must fit into staging at once, on the rank that needs most: the same on all ranks"""


def layer_move(migration: Migration, layer: int, rank: int) -> LayerMove:
    """The moves of a layer as seen from a rank."""
    before, after = migration.before.home_of_expert[layer], migration.after.home_of_expert[layer]
    num_ranks = migration.before.cluster.num_ranks
    old, new = np.flatnonzero(before == rank), np.flatnonzero(after == rank)
    leaving, arriving = old[after[old] != rank], new[before[new] != rank]
    leaving = leaving[np.argsort(after[leaving], kind="stable")]
    arriving = arriving[np.argsort(before[arriving], kind="stable")]
    stay = old[after[old] == rank]
    shifted = np.stack([np.searchsorted(old, stay), np.searchsorted(new, stay)], axis=1)
    most_leaving = int(np.bincount(before[before != after], minlength=num_ranks).max())
    return LayerMove(
        layer=layer,
        leaving_slots=np.searchsorted(old, leaving).tolist(),
        sent_sizes=np.bincount(after[leaving], minlength=num_ranks).tolist(),
        arriving_experts=arriving.tolist(),
        arriving_from=before[arriving].tolist(),
        arriving_slots=np.searchsorted(new, arriving).tolist(),
        received_sizes=np.bincount(before[arriving], minlength=num_ranks).tolist(),
        shifted=[(int(a), int(b)) for a, b in shifted if a != b],
        staging_rows=len(old) + most_leaving,  # S packed, S received, at most H - S aside
    )


def width_of(move: LayerMove, num_columns: int, max_bytes: int) -> int:
    """Columns that can be moved at once."""
    width = max_bytes // move.staging_rows // ALIGNMENT * ALIGNMENT
    if width < ALIGNMENT:
        raise BudgetError(
            f"cannot move homes of MoE layer {move.layer} with {max_bytes} bytes of staging: {move.staging_rows} rows "
            f"are handled at once, which needs {move.staging_rows * ALIGNMENT} bytes or more; raise max_bytes"
        )
    return min(width, -(-num_columns // ALIGNMENT) * ALIGNMENT)


@torch.no_grad()
def move_columns(group: ExpertGroup, move: LayerMove, columns_Hw: Tensor, staging: Tensor) -> None:
    """Bring the rows of a few columns to their new ranks and slots."""
    width, num_leaving, num_shifted = columns_Hw.shape[1], len(move.leaving_slots), len(move.shifted)
    used = staging[: (2 * num_leaving + num_shifted) * width].view(-1, width)
    sent, received, aside = torch.split(used, [num_leaving, num_leaving, num_shifted])
    for row, slot in enumerate(move.leaving_slots):
        sent[row].copy_(columns_Hw[slot])
    moving = group.all_to_all(
        Channel.STANDING, sent.reshape(-1), [n * width for n in move.sent_sizes], received.view(-1),
        [n * width for n in move.received_sizes], what=f"moving homes of MoE layer {move.layer}",
    )  # fmt: skip
    for row, (slot, _) in enumerate(move.shifted):
        aside[row].copy_(columns_Hw[slot])
    moving.wait()
    for row, (_, slot) in enumerate(move.shifted):
        columns_Hw[slot].copy_(aside[row])
    for row, slot in enumerate(move.arriving_slots):
        columns_Hw[slot].copy_(received[row])
