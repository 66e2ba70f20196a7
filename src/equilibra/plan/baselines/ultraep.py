"""UltraEP's rule: exact loads of one micro-batch, flash copies with quotas inside a node, smallest feasible threshold.

Method, per layer, micro-batch and node. For a threshold T the fullest rank exports what it has above T: its heaviest
expert goes to the emptiest rank that has a free slot, as many tokens as the excess, the room below T and the expert
allow; until no rank is above T (feasible) or nobody can take more (not feasible). The smallest feasible T between the
mean and the fullest rank is found by bisection. A floor of tokens per copy is optional; UltraEP's own default is
1024.

Promises: never slower than the homes alone; at most spare_slots copies on a rank. The greedy is not monotone in T, so a
smaller feasible T may be missed, as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from equilibra.core.checks import check_whole
from equilibra.core.kernel import kernel
from equilibra.core.plan import StepPlan
from equilibra.plan.baselines.assemble import EXPERT, QUOTA, RANK, flash_copies, step_plan
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["UltraEP"]


@dataclass(frozen=True, kw_only=True)
class UltraEP:
    """Online exact balancing by flash copies with quotas."""

    timing: ClassVar[Timing] = Timing.ONLINE
    online_us: ClassVar[float] = 70.0

    name: str = "ultraep"
    min_tokens_per_copy: int = 0
    """fewest tokens of a copy"""

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
