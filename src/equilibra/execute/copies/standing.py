"""Standing copies on this rank: weights fetched once per version, gradients accumulated over a step and returned once.

Symbols: L layers, C standing copies on this rank, P values of one expert in flat form.

All ranks of the expert-parallel group make the same calls; layers without standing copies on any rank are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibra.core.plan import StepPlan
from equilibra.core.visit import CopyList
from equilibra.execute.experts.weights import HomeExperts
from equilibra.execute.group import Channel, ExpertGroup, Pending
from equilibra.execute.kernels import add_in_order
from equilibra.execute.record import Moment


class StandingStore:
    """The standing copies of one plan, and access to all instances of this rank that flash copies are made of."""

    def __init__(
        self, group: ExpertGroup, weights: Sequence[HomeExperts], plan: StepPlan | None,
        before: StandingStore | None = None, now: Callable[[], Moment] = perf_counter,
    ) -> None:  # fmt: skip
        """Reuse the memory of the store `before`, if it is large enough."""
        self.group, self.weights, self._now = group, weights, now
        self._lists = _layer_lists(plan, group.rank) if plan is not None else {}
        self._rows: dict[int, slice] = {}
        """by layer, rows of the copies on this rank"""
        held = 0
        for layer, entry in self._lists.items():
            self._rows[layer] = slice(held, held + entry.held_expert.size)
            held += entry.held_expert.size
        layout, like = weights[0].layout, weights[0]
        if before is not None and len(before.rows_CP) >= held and before.rows_CP.dtype == like.dtype:
            self.rows_CP: Tensor = before.rows_CP
            self.gradients_CP: Tensor = before.gradients_CP.zero_()
        else:
            self.rows_CP = torch.zeros(held, layout.size, dtype=like.dtype, device=like.device)
            self.gradients_CP = torch.zeros(held, layout.size, dtype=like.gradient_dtype, device=like.device)
        self._arriving: dict[int, Pending] = {}
        self._arrived: set[int] = set()
        self.asked: dict[int, Moment] = {}
        """by layer, when its copies were requested"""

    @property
    def num_bytes(self) -> int:
        return self.rows_CP.nbytes + self.gradients_CP.nbytes

    def forget(self) -> None:
        """Drop all copies, because the weights have changed."""
        for moving in self._arriving.values():
            moving.wait()
        self._arriving.clear()
        self._arrived.clear()

    def start(self, layer: int) -> None:
        """Start fetching a layer's copies, unless they are here or in flight."""
        entry = self._lists.get(layer)
        if entry is None or layer in self._arriving or layer in self._arrived:
            return
        sent = self.rows_CP.new_empty(entry.served_expert.size, self.rows_CP.shape[1])
        self.asked[layer] = self._now()
        self.weights[layer].check_version(layer)
        for row, expert in enumerate(entry.served_expert.tolist()):
            self.weights[layer].write_flat(expert, sent[row])
        self._arriving[layer] = self.group.all_to_all(
            Channel.STANDING, sent, entry.served_sizes, self.rows_CP[self._rows[layer]], entry.held_sizes,
            what=f"fetching standing copies of MoE layer {layer}",
        )  # fmt: skip

    def wait(self, layer: int) -> CopyList | None:
        """Wait for a layer's copies; returns the list held here if they arrived just now."""
        self.start(layer)
        moving = self._arriving.pop(layer, None)
        if moving is None:
            return None
        moving.wait()
        self._arrived.add(layer)
        return self._lists[layer]

    @property
    def layers(self) -> list[int]:
        """Layers with standing copies on any rank."""
        return list(self._lists)

    def list_of(self, layer: int) -> CopyList:
        return self._lists[layer]

    def row_of(self, layer: int, expert: int) -> int:
        return int(self._rows[layer].start + np.flatnonzero(self._lists[layer].held_expert == expert)[0])

    def holds(self, layer: int, expert: int) -> bool:
        return layer in self._lists and bool((self._lists[layer].held_expert == expert).any())

    def num_held(self, layer: int) -> int:
        """A layer's copies on this rank."""
        return self._lists[layer].held_expert.size if layer in self._lists else 0

    def parts(self, layer: int) -> tuple[list[Any], list[Any]]:
        """Views of a layer's copies on this rank and of their gradients, by expert."""
        if layer not in self._lists:
            return [], []
        entry, rows, layout = self._lists[layer], self._rows[layer], self.weights[layer].layout
        copies, gradients = layout.experts(self.rows_CP[rows]), layout.experts(self.gradients_CP[rows])
        order = np.argsort(entry.held_expert, kind="stable").tolist()
        return [copies[i] for i in order], [gradients[i] for i in order]

    def give_back(self, layers: Iterable[int]) -> None:
        """Return all gradients of these layers; homes add them by holding rank and expert."""
        for layer in layers:
            entry = self._lists[layer]
            if not self.weights[layer].learns:
                continue
            received = self.gradients_CP.new_empty(entry.served_expert.size, self.gradients_CP.shape[1])
            self.group.all_to_all(
                Channel.STANDING, self.gradients_CP[self._rows[layer]], entry.held_sizes, received, entry.served_sizes,
                what=f"returning gradients of standing copies of MoE layer {layer}",
            ).wait()  # fmt: skip
            for row, expert in enumerate(entry.served_expert.tolist()):
                self.weights[layer].add_gradient(expert, received[row])
            self.gradients_CP[self._rows[layer]].zero_()

    # --- instances of this rank, homes and standing copies, that flash copies are made of ---

    def location(self, layer: int, expert: int) -> int:
        """Slot of a home, or -1 - row of a standing copy, after it has arrived."""
        if self.holds(layer, expert):
            self.wait(layer)
            return -1 - self.row_of(layer, expert)
        return self.weights[layer].slot_of(expert)

    def write_flat(self, layer: int, expert: int, row_P: Tensor) -> None:
        """Copy an instance's weights into a row."""
        if self.holds(layer, expert):
            self.wait(layer)
            row_P.copy_(self.rows_CP[self.row_of(layer, expert)])
        else:
            self.weights[layer].check_version(layer)
            self.weights[layer].write_flat(expert, row_P)

    def add_gradient(self, layer: int, expert: int, *rows_P: Tensor) -> None:
        """Add gradients to an instance's, in order."""
        if self.holds(layer, expert):
            add_in_order(self.gradients_CP[self.row_of(layer, expert)], rows_P)
        else:
            self.weights[layer].add_gradient(expert, *rows_P)


def _layer_lists(plan: StepPlan, rank: int) -> dict[int, CopyList]:
    """Copy lists of the layers with standing copies on any rank, in order."""
    standing, home, ranks = plan.standing, plan.placement.home_of_expert, range(plan.cluster.num_ranks)
    lists: dict[int, CopyList] = {}
    for layer in np.unique(standing.layer).tolist():
        of_layer = standing.layer == layer
        expert, holder = standing.expert[of_layer], standing.rank[of_layer]
        lists[layer] = CopyList.of(layer, expert, home[layer, expert], holder, rank, ranks)
    return lists
