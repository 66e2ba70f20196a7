"""Effective loads, slowly: rows of every rank and what the copies it holds and serves cost it."""

import numpy as np

from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.plan.one_layer import Balanced


def effective_load(done: Balanced, home: np.ndarray, *, hold: int, serve: int) -> np.ndarray:
    """[R] of one micro-batch."""
    result = done.rank_load.copy()
    for expert, rank in zip(done.expert_of_copy, done.rank_of_copy, strict=True):
        result[rank] += hold
        result[home[expert]] += serve
    return result


def effective_rows(plan: StepPlan, load: StepLoad, stage: Stage, *, hold: int, serve: int) -> np.ndarray:
    """[L, M, R] of a step: standing copies that serve somebody are held too."""
    result = plan.rank_load(load, stage).copy()
    num_micro_batches, part = load.num_micro_batches, plan.stages[stage]
    for entry, (first, last) in enumerate(zip(part.first_of_problem[:-1], part.first_of_problem[1:], strict=True)):
        layer, m = divmod(entry, num_micro_batches)
        for copy in range(first, last):
            result[layer, m, part.rank[copy]] += hold
            result[layer, m, part.origin[copy]] += serve
    for copy in range(plan.standing.num_copies):
        for m in range(num_micro_batches):
            if part.standing_tokens_CMR[copy, m].any():
                result[plan.standing.layer[copy], m, plan.standing.rank[copy]] += hold
    return result
