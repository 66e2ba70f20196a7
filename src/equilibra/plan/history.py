"""Plans from past loads: the shares that standing copies take of steps whose loads are not known yet.

Symbols: M micro-batches, L layers, E experts, R ranks, C standing copies.

A plan of past steps says how many tokens of each source rank every standing copy took. In later steps the copy takes
the same share of the tokens that a source rank has for the expert, rounded down: each rank applies the rule alone,
without the counts of others. Shares are whole numbers out of SCALE, so that all ranks and devices round alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StagePlan, StepPlan

SCALE = 1 << 20


def shares_of(plan: StepPlan, load: StepLoad) -> NDArray[np.int32]:
    """[C, R] share, out of SCALE, of a source's tokens that each standing copy took; load: that of the plan."""
    if plan.stages[Stage.UPDATE].num_copies:
        raise InputError("a plan from past loads must have no flash copies: plan with spare_slots=0")
    standing, taken_CMR = plan.standing, plan.stages[Stage.UPDATE].standing_tokens_CMR
    total_CR = load.tokens_MLER.sum(axis=0, dtype=np.int64)[standing.layer, standing.expert]
    shares_CR: NDArray[np.int64] = taken_CMR.sum(axis=1, dtype=np.int64) * SCALE // np.maximum(total_CR, 1)
    return shares_CR.astype(np.int32)


def rank_load_by_shares(load: StepLoad, plan: StepPlan, shares_CR: NDArray[np.int32]) -> NDArray[np.int64]:
    """[L, M, R] tokens that each rank computes of another load, under the homes and standing copies of a plan."""
    standing = plan.standing
    before_CR = shares_CR.cumsum(axis=0, dtype=np.int64) - shares_CR
    key = standing.layer.astype(np.int64) * load.num_experts + standing.expert
    begin_CR = before_CR - before_CR[np.searchsorted(key, key)]  # after the earlier copies of the same expert
    count_CMR = load.tokens_MLER[:, standing.layer, standing.expert].transpose(1, 0, 2).astype(np.int64)
    upto_begin, upto_end = (count_CMR * share[:, None] // SCALE for share in (begin_CR, begin_CR + shares_CR))
    part = StagePlan.without_flash((upto_end - upto_begin).astype(np.int32), load.num_layers)
    return part.rank_rows(load.expert_load(), plan.placement.home_of_expert, standing)
