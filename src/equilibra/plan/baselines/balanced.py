"""Balanced: every rank computes the same number of tokens, an ideal to measure the others by.

Method, per layer and micro-batch. All (token, expert) pairs lie on a line in the order of their experts' homes; the
line is cut into R pieces that differ by at most one pair; each rank computes one piece. Slots and nodes do not
matter, so the slowest rank is at the lower bound exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from equilibra.core.kernel import kernel
from equilibra.core.plan import StepPlan
from equilibra.plan.baselines.assemble import EXPERT, QUOTA, RANK, flash_copies, step_plan
from equilibra.plan.planner import StepProblem

__all__ = ["Balanced"]


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Perfect balance with as many copies as it takes."""

    respects_slots: ClassVar[bool] = False
    respects_nodes: ClassVar[bool] = False

    name: str = "balanced"

    def plan(self, problem: StepProblem) -> StepPlan:
        return step_plan(problem, self.name, flash_copies(problem, partial(_cut, problem.cluster.num_ranks)))


@kernel
def _cut(num_ranks, copies, load, home):  # type: ignore[no-untyped-def]
    """Copies of one micro-batch; returns their number, at most experts + ranks - 1."""
    total = load.sum()
    at = np.int64(0)
    rank = 0
    n = 0
    for e in np.argsort(home, kind="mergesort"):
        end = at + load[e]
        while at < end:
            piece_end = (rank + 1) * total // num_ranks
            amount = min(end, piece_end) - at
            if amount > 0 and rank != home[e]:
                copies[EXPERT, n] = e
                copies[RANK, n] = rank
                copies[QUOTA, n] = amount
                n += 1
            at += amount
            if at == piece_end:
                rank += 1
    return n
