"""TransferEngine: how flash copies reach spare slots, and how their gradients return. One protocol, several paths.

Symbols: n copies that this rank holds, P values of one expert in flat form, R ranks of the node.

Everything here is per node: all ranks of a node make the same calls in the same order, also those that neither send nor
receive; calls are left out only where the whole node has nothing to move, which every rank knows from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.plan import Stage, StepPlan
from equilibra.core.visit import CopyList
from equilibra.execute.group import ExpertGroup, Pending

__all__ = ["Copied", "ExpertSource", "Path", "TransferEngine", "copied_of"]


class Path(StrEnum):
    """Ways for flash copies."""

    COLLECTIVE = "collective"
    """all-to-all inside the node: works anywhere"""
    HOST = "host"
    """memory of the node that every rank reads and writes: nobody waits for the home rank"""
    IPC = "ipc"
    """from the memory of the other GPU of the node, pulled by copy engines"""
    BOTH = "both"
    """both links at once: most of a copy from the other GPU, the rest from the node's memory"""
    AUTO = "auto"
    """by plan and stage: ipc, or both where one link would be late; host where GPUs cannot open each other's memory;
    collective without GPUs"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Copied:
    """The instances that flash copies are made of, in this rank's node."""

    layer: NDArray[np.int32]
    """[n] by layer and expert"""
    expert: NDArray[np.int32]
    """[n]"""
    origin: NDArray[np.int32]
    """[n] the rank that has the instance"""
    most_of_a_node: int
    """n of the node that has most: buffers have the same size everywhere"""
    most_served: int
    """copies that are made of one rank's instances for one layer and micro-batch, where they are most"""

    def entry_of(self, layer: int, expert: int, origin: int) -> int:
        """The number of an instance."""
        return int(np.flatnonzero((self.layer == layer) & (self.expert == expert) & (self.origin == origin))[0])


def copied_of(plan: StepPlan, stages: Iterable[Stage], group: ExpertGroup) -> Copied:
    """What some stages of a plan copy."""
    per_node, found, most_served = group.cluster.ranks_per_node, [np.zeros((4, 0), np.int64)], 0
    for stage in stages:
        part = plan.stages[stage]
        layer = part.problem_of_copy() // plan.num_micro_batches
        of_rank = part.problem_of_copy() * group.num_ranks + part.origin
        most_served = max(most_served, int(np.bincount(of_rank).max(initial=0)))
        found.append(np.stack([part.origin // per_node, layer, part.expert, part.origin]).astype(np.int64))
    every = np.unique(np.concatenate(found, axis=1), axis=1)
    mine = every[1:, every[0] == group.node].astype(np.int32)
    most = int(np.bincount(every[0]).max()) if every.size else 0
    return Copied(layer=mine[0], expert=mine[1], origin=mine[2], most_of_a_node=most, most_served=most_served)


class ExpertSource(Protocol):
    """The instances on this rank that copies are made of: homes and standing copies."""

    def write_flat(self, layer: int, expert: int, row_P: Tensor) -> None:
        """Copy an instance's weights into a row."""
        ...

    def add_gradient(self, layer: int, expert: int, *rows_P: Tensor) -> None:
        """Add gradients to an instance's, one after another."""
        ...


class TransferEngine(Protocol):
    """One path. Versions count changes of the weights; an engine never hands out a version other than the asked one."""

    @property
    def num_bytes(self) -> int:
        """Memory the engine holds beside the slots: gradients, and what ranks of a node share (counted on each)."""
        ...

    def serve(self, source: ExpertSource) -> None:
        """Copies are made of these instances from now on."""
        ...

    def publish(self, version: int, copied: Copied) -> None:
        """Make the weights of this version available for the copies of a plan. All ranks of all nodes call."""
        ...

    def fetch(self, copies: CopyList, version: int, slots_nP: Tensor) -> Pending:
        """Start to fill this rank's slots with the copies it holds."""
        ...

    def gradient_slots(self, copies: CopyList) -> Tensor:
        """[n, P] where this rank writes the gradients of the copies it holds, over old ones; one list at a time."""
        ...

    def give_back(self, copies: CopyList) -> Pending:
        """Start to return what was written there.

        When it was waited for, it has been added to the origins' gradients, by holding rank and expert.
        """
        ...

    def finish_sums(self) -> None:
        """Gradients that came home have been added, for whoever computes next."""
        ...

    def finish_reads(self) -> None:
        """Before weights change: nobody reads them for copies any more. All ranks of all nodes call."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
