"""Fill: flash copies and splits of every micro-batch of one layer, under a choice of homes and standing copies.

Symbols: M micro-batches, R ranks, C standing copies of the layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.plan import Stage, StagePlan, StandingCopies
from equilibra.plan.layer import Choice, LayerProblem
from equilibra.plan.micro_batch import CopyCosts, balance_micro_batches, scratch_for

__all__ = ["fill", "real_cost_us"]


def fill(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], costs: CopyCosts, row_slack: float
) -> StagePlan:
    """Balance every micro-batch; standing_rank [C] is the rank of each standing copy. row_slack: see `across`."""
    load, cluster, slots = problem.load, problem.cluster, problem.limits.spare_slots
    scratch = scratch_for(cluster, choice.home_of_expert, slots, choice.standing_expert, standing_rank)
    standing_MCR = np.zeros((load.num_micro_batches, choice.standing_expert.size, cluster.num_ranks), np.int32)
    flash = balance_micro_batches(
        load.tokens_MLER, problem.layer, scratch, cluster, slots, costs, row_slack, standing_MCR
    )
    expert, rank, origin = flash.copies[:3].astype(np.int32)
    return StagePlan(
        first_of_problem=flash.first_of_micro_batch, expert=expert, rank=rank, origin=origin,
        tokens_FR=flash.tokens_FR.copy(),
        standing_tokens_CMR=np.ascontiguousarray(standing_MCR.transpose(1, 0, 2)),
    )  # fmt: skip


def real_cost_us(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], copies: dict[Stage, StagePlan]
) -> float:
    """Cost of a choice by its actual rank loads instead of node loads.

    In each stage it counts the slowest rank with the copies it holds and serves, and the exposed part of the busiest
    link's flash copies: a small share, or all that exceeds the time of the layer.
    """
    rates = problem.rates
    standing = StandingCopies(
        layer=np.zeros(standing_rank.size, np.int32), expert=choice.standing_expert.astype(np.int32),
        rank=standing_rank.astype(np.int32),
    )  # fmt: skip
    cost_us = choice.traffic_us + choice.moving_us
    for stage in Stage:
        part = copies[stage]
        rows_MR = part.rank_rows(problem.load_EM.T[:, None], choice.home_of_expert[None], standing)[0]
        received, sent = part.on_links()
        busiest = np.maximum(received, sent).max(axis=1)
        held_us = (received + part.standing_in_use(standing)) * rates.hold_us[stage]
        rows_us = (rows_MR * rates.row_us[stage] + (held_us + sent * rates.serve_us[stage])).max(axis=1)
        gap_us = rows_us + rates.gap_us[stage] + rows_MR.mean(axis=1) * rates.gap_row_us[stage]
        too_long_us = busiest * rates.link_us[stage] - gap_us
        exposed_us = np.maximum(busiest * rates.exposed_share * rates.flash_copy_us[stage], too_long_us)
        cost_us += float(rows_us.sum() + exposed_us.sum())
    return cost_us
