"""Plans from past loads: what standing copies take of steps that nobody has seen yet.

Symbols: M micro-batches, L layers, E experts, R ranks, C standing copies.

A plan of past steps says how many tokens of each source rank every standing copy took. Of later steps it takes the same
share of what a source rank has for the expert, rounded down: a rule that every rank follows by itself, without counts
of others. Shares are whole numbers of SCALE, so that all ranks and devices round alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan

__all__ = ["SCALE", "rank_load_by_shares", "shares_of"]

SCALE = 1 << 20


def shares_of(plan: StepPlan, load: StepLoad) -> NDArray[np.int32]:
    """[C, R] what each standing copy takes of a source's tokens of its expert, of SCALE; load: the plan's own."""
    if plan.stages[Stage.UPDATE].num_copies:
        raise InputError("a plan from past loads must have no flash copies: plan with spare_slots=0")
    standing, taken_CMR = plan.standing, plan.stages[Stage.UPDATE].standing_tokens_CMR
    total_CR = load.tokens_MLER.sum(axis=0, dtype=np.int64)[standing.layer, standing.expert]
    taken_CR = taken_CMR.sum(axis=1, dtype=np.int64)
    shares_CR: NDArray[np.int64] = taken_CR * SCALE // np.maximum(total_CR, 1)
    return shares_CR.astype(np.int32)


def rank_load_by_shares(load: StepLoad, plan: StepPlan, shares_CR: NDArray[np.int32]) -> NDArray[np.int64]:
    """[L, M, R] tokens that each rank computes of another load, under the homes and standing copies of a plan."""
    tokens_MLER, home_LE, standing = load.tokens_MLER, plan.placement.home_of_expert, plan.standing
    rows_LMR = np.zeros((load.num_layers, load.num_micro_batches, load.num_ranks), np.int64)
    layer, expert = np.indices(home_LE.shape)
    np.add.at(rows_LMR.transpose(0, 2, 1), (layer, home_LE), load.expert_load().transpose(1, 2, 0)[layer, expert])
    begin_R, before = np.zeros(load.num_ranks, np.int64), (-1, -1)
    for c, (at, e, rank) in enumerate(zip(standing.layer, standing.expert, standing.rank, strict=True)):
        begin_R = begin_R if (at, e) == before else np.zeros_like(begin_R)  # copies of an expert follow one another
        end_R, before = begin_R + shares_CR[c], (at, e)
        count_MR = tokens_MLER[:, at, e].astype(np.int64)
        moved_M = (count_MR * end_R // SCALE - count_MR * begin_R // SCALE).sum(axis=1)
        rows_LMR[at, :, home_LE[at, e]] -= moved_M
        rows_LMR[at, :, rank] += moved_M
        begin_R = end_R
    return rows_LMR
