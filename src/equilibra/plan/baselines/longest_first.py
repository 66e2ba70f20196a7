"""Planners that copy nothing: static placement, and LPT (longest processing time), which reorders homes.

LPT gives the heaviest expert of the batch to the least loaded rank with room, then the next. It levels the sum over
micro-batches, not their maxima: ranks that are slow in turn look balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel
from equilibra.core.plan import StepPlan
from equilibra.plan.baselines.assemble import no_flash_copies, step_plan
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["LongestFirst", "Static", "batch_total", "longest_first_homes", "pack_evenly"]


@dataclass(frozen=True, kw_only=True)
class Static:
    """Plain expert parallelism: contiguous homes, or those of the previous placement."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "static"

    def plan(self, problem: StepProblem) -> StepPlan:
        return step_plan(problem, self.name, no_flash_copies(problem))


@dataclass(frozen=True, kw_only=True)
class LongestFirst:
    """Homes packed by the batch total, no copies."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "lpt"

    def plan(self, problem: StepProblem) -> StepPlan:
        return step_plan(problem, self.name, no_flash_copies(problem), home_of_expert=longest_first_homes(problem))


def batch_total(problem: StepProblem) -> NDArray[np.int64]:
    """[L, E] tokens of the coming step, known to an oracle only."""
    total_LE: NDArray[np.int64] = problem.load.expert_load().sum(axis=0)
    return total_LE


def longest_first_homes(problem: StepProblem) -> NDArray[np.int32]:
    """[L, E] homes packed by the batch total, the same number on every rank."""
    total_LE, num_ranks = batch_total(problem), problem.cluster.num_ranks
    home = np.empty(total_LE.shape, np.int32)
    for layer, total in enumerate(total_LE):
        expert_of_slot = pack_evenly(total.astype(np.float64), num_ranks)
        home[layer, expert_of_slot] = np.arange(num_ranks)[:, None]
    return home


@kernel
def pack_evenly(weight, num_bins):  # type: ignore[no-untyped-def]
    """[bins, items / bins] items of each bin: heaviest first into the lightest bin with room. One item per bin stays in
    order.
    """
    room = weight.size // num_bins
    if room == 1:
        return np.arange(weight.size).reshape(num_bins, 1)
    item_of_slot = np.empty((num_bins, room), np.int64)
    filled = np.zeros(num_bins, np.int64)
    total = np.zeros(num_bins, np.float64)
    for item in np.argsort(-weight, kind="mergesort"):
        lightest = -1
        for b in range(num_bins):
            if filled[b] < room and (lightest < 0 or total[b] < total[lightest]):
                lightest = b
        item_of_slot[lightest, filled[lightest]] = item
        filled[lightest] += 1
        total[lightest] += weight[item]
    return item_of_slot
