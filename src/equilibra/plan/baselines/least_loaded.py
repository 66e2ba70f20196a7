"""LLEP's rule (least-loaded expert parallelism): spill what is above capacity to the least loaded rank, in chunks.

Method, per layer and micro-batch. Only if the fullest rank is above 1.3 times the mean: experts in the order of their
load, heaviest first; if the home is above capacity (the mean), the expert's share of the excess goes to the least
loaded rank of the whole group as far as there is room below capacity, then to the next. A chunk has at least 1024
tokens; what cannot go in such chunks stays at home.

LLEP knows neither nodes nor slots: weights follow tokens into memory allocated for them. So copies cross nodes here,
and a rank may receive any number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from equilibra.core.checks import check_number, check_whole
from equilibra.core.kernel import kernel
from equilibra.core.plan import StepPlan
from equilibra.plan.baselines.assemble import EXPERT, QUOTA, RANK, flash_copies, step_plan
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["LeastLoaded"]


@dataclass(frozen=True, kw_only=True)
class LeastLoaded:
    """Online exact balancing without a slot limit."""

    respects_slots: ClassVar[bool] = False
    respects_nodes: ClassVar[bool] = False

    timing: ClassVar[Timing] = Timing.ONLINE
    online_us: ClassVar[float] = 50.0

    name: str = "llep"
    trigger: float = 1.3
    """imbalance up to which nothing is copied"""
    capacity: float = 1.0
    """load above which a rank spills and up to which it receives, over the mean"""
    min_chunk: int = 1024
    """fewest tokens of a chunk"""

    def __post_init__(self) -> None:
        check_whole("min_chunk", self.min_chunk, low=1)
        for name in ("trigger", "capacity"):
            check_number(name, getattr(self, name), low=1)

    def plan(self, problem: StepProblem) -> StepPlan:
        solve = partial(_spill, problem.cluster.num_ranks, self.trigger, self.capacity, self.min_chunk)
        return step_plan(problem, self.name, flash_copies(problem, solve))


@kernel
def _spill(num_ranks, trigger, capacity, min_chunk, copies, load, home):  # type: ignore[no-untyped-def]
    """Copies of one micro-batch; returns their number, at most experts + ranks."""
    x = np.zeros(num_ranks, np.int64)
    for e in range(load.size):
        x[home[e]] += load[e]
    total = x.sum()
    if x.max() * num_ranks <= trigger * total:
        return 0
    full = np.int64(np.ceil(capacity * total / num_ranks))
    n = 0
    for e in np.argsort(-load, kind="mergesort"):
        excess = min(load[e], x[home[e]] - full)
        while excess >= min_chunk:
            target = np.argmin(x)
            amount = min(excess, full - x[target])
            if amount < min_chunk:
                return n  # nobody has room for a chunk
            copies[EXPERT, n] = e
            copies[RANK, n] = target
            copies[QUOTA, n] = amount
            x[home[e]] -= amount
            x[target] += amount
            excess -= amount
            n += 1
    return n
