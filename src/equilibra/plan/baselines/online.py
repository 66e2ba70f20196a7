"""Planners that make flash copies for every micro-batch from its exact loads: UltraEP, LLEP, and the balanced ideal.

UltraEP. For a threshold T the fullest rank exports its excess: its heaviest expert goes to the emptiest rank with a
free slot, until no rank is above T or nobody can take more. The smallest feasible T is found by bisection; as in the
original, the greedy is not monotone in T and may miss one.

LLEP (least-loaded expert parallelism). Only if the fullest rank is above 1.3 times the mean: heaviest expert first,
what its home has above capacity (the mean) goes to the least loaded rank with room, then to the next, in chunks of at
least 1024 tokens. It knows neither nodes nor slots: copies cross nodes, and a rank may receive any number of experts.

Balanced. All (token, expert) pairs, in the order of their experts' homes, are cut into R pieces that differ by at most
one pair. Slots and nodes do not matter, so the slowest rank is at the lower bound: an ideal to measure others by.
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


@dataclass(frozen=True, kw_only=True)
class UltraEP:
    """Online balancing of exact loads, by flash copies with quotas."""

    timing: ClassVar[Timing] = Timing.ONLINE
    online_us: ClassVar[float] = 70.0

    name: str = "ultraep"
    min_tokens_per_copy: int = 0
    """smallest quota of a copy"""

    def __post_init__(self) -> None:
        check_whole("min_tokens_per_copy", self.min_tokens_per_copy, low=0)

    def plan(self, problem: StepProblem) -> StepPlan:
        nodes, group = problem.cluster.num_nodes, problem.cluster.ranks_per_node
        solve = partial(_smallest_threshold, nodes, group, problem.spare_slots, self.min_tokens_per_copy)
        return step_plan(problem, self.name, flash_copies(problem, solve))


@kernel
def _smallest_threshold(num_nodes, group, slots, floor, copies, load, home):  # type: ignore[no-untyped-def]
    """Copies of all nodes; returns their number."""
    by_home = np.argsort(home, kind="mergesort")
    first = np.searchsorted(home[by_home], np.arange(num_nodes * group + 1))
    at_home = np.zeros(num_nodes * group, np.int64)
    for e in range(load.size):
        at_home[home[e]] += load[e]
    n = 0
    for node in range(num_nodes):
        low, high = node * group, (node + 1) * group
        too_low = at_home[low:high].sum() // group - 1
        enough = at_home[low:high].max()
        while enough - too_low > 1:
            middle = (too_low + enough) // 2
            if _export(load, at_home, by_home, first, low, high, middle, slots, floor, copies, n) >= 0:
                enough = middle
            else:
                too_low = middle
        n = _export(load, at_home, by_home, first, low, high, enough, slots, floor, copies, n)
    return n


@kernel
def _export(load, at_home, by_home, first, low, high, threshold, slots, floor, copies, n):  # type: ignore[no-untyped-def]
    """Copies from row n on that bring ranks low..high - 1 down to the threshold; returns their end, -1 if none do."""
    left = load.copy()
    x = at_home.copy()
    free = np.full(high, slots, np.int64)
    while True:
        source = low + np.argmax(x[low:high])
        if x[source] <= threshold:
            return n
        target = -1
        for r in range(low, high):
            if free[r] > 0 and x[r] < threshold and (target < 0 or x[r] < x[target]):
                target = r
        if target < 0:
            return -1
        expert = by_home[first[source]]
        for i in range(first[source] + 1, first[source + 1]):
            if left[by_home[i]] > left[expert]:
                expert = by_home[i]
        # One of excess, room and expert is used up, so no pair of expert and target comes twice.
        amount = min(max(x[source] - threshold, floor), threshold - x[target], left[expert])
        if amount < max(floor, 1):
            return -1
        copies[EXPERT, n] = expert
        copies[RANK, n] = target
        copies[QUOTA, n] = amount
        left[expert] -= amount
        x[source] -= amount
        x[target] += amount
        free[target] -= 1
        n += 1


@dataclass(frozen=True, kw_only=True)
class LeastLoaded:
    """Online balancing of exact loads without a slot limit."""

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
