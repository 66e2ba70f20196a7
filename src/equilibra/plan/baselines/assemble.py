"""Turn the decisions of a baseline into a StepPlan.

Symbols: M micro-batches, L layers, R ranks, E experts, C standing copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.plan.level import split_expert
from equilibra.plan.planner import StepProblem

EXPERT, RANK, QUOTA = 0, 1, 2
"""rows of the array of copies that a solver fills"""

Solver = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]], int]
"""(copies [3, ...], load [E], home [E]) -> number of copies written"""


def step_plan(
    problem: StepProblem,
    planner: str,
    stage: StagePlan | None = None,
    *,
    home_of_expert: NDArray[np.int32] | None = None,
    standing: StandingCopies | None = None,
) -> StepPlan:
    """A plan with the same copies in both stages (none: only homes serve tokens); homes stay unless given."""
    homes, load = problem.home_now, problem.load
    if home_of_expert is not None:
        homes = Placement(home_of_expert=home_of_expert, cluster=problem.cluster)
    if stage is None:
        none = np.zeros((0, load.num_micro_batches, load.num_ranks), np.int32)
        stage = StagePlan.without_flash(none, load.num_layers)
    return StepPlan(
        planner=planner,
        placement=homes,
        previous=problem.home_now,
        standing=standing or StandingCopies.none(),
        stages=dict.fromkeys(Stage, stage),
        bound_LM=load.lower_bound(),
        schedule=problem.schedule,
    )


def flash_copies(problem: StepProblem, solve: Solver) -> StagePlan:
    """A stage whose flash copies and quotas `solve` finds for every layer and micro-batch; homes stay."""
    load_MLE, home = problem.load.expert_load(), problem.home_now.home_of_expert
    num_micro_batches, num_layers, num_experts = load_MLE.shape
    num_ranks, group = problem.cluster.num_ranks, problem.cluster.ranks_per_node
    copies = np.zeros((3, num_experts + num_ranks * (problem.spare_slots + 1)), np.int64)
    first = [0]
    found, origin, tokens = [], [], []
    for layer in range(num_layers):
        for m in range(num_micro_batches):
            n = solve(copies, load_MLE[m, layer], home[layer])
            these = np.ascontiguousarray(copies[:, np.lexsort((copies[RANK, :n], copies[EXPERT, :n]))])
            out = np.zeros((n, num_ranks), np.int32)
            split_copies(problem.load.tokens_MLER[m, layer], home[layer], group, *these, out)
            first.append(first[-1] + n)
            found.append(these[:QUOTA].astype(np.int32))
            origin.append(home[layer][these[EXPERT]])
            tokens.append(out)
    expert, rank = np.concatenate(found, axis=1)
    return StagePlan(
        first_of_problem=np.array(first, np.int64), expert=expert, rank=rank, origin=np.concatenate(origin),
        tokens_FR=np.concatenate(tokens),
        standing_tokens_CMR=np.zeros((0, num_micro_batches, num_ranks), np.int32),
    )  # fmt: skip


@kernel
def split_copies(tokens_ER, home, group, expert, rank, quota, out):  # type: ignore[no-untyped-def]
    """Tokens by source into out [copies, R], zero before, for copies sorted by expert; local tokens first."""
    num_ranks, n = tokens_ER.shape[1], expert.size
    left = np.empty(num_ranks, np.int64)
    ranks, nodes, quotas, rows = np.empty((4, n + 1), np.int64)
    c = 0
    while c < n:
        e = expert[c]
        at_home = np.int64(0)
        for r in range(num_ranks):
            left[r] = tokens_ER[e, r]
            at_home += left[r]
        q = 0
        while c < n and expert[c] == e:
            ranks[q] = rank[c]
            nodes[q] = rank[c] // group
            quotas[q] = quota[c]
            rows[q] = c
            at_home -= quota[c]
            q += 1
            c += 1
        ranks[q] = home[e]
        nodes[q] = home[e] // group
        quotas[q] = at_home
        split_expert(left, ranks, nodes, quotas, q, group, rows, out)
