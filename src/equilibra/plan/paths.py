"""Stages whose flash copies are late over the fast link alone and need a second one."""

from __future__ import annotations

import numpy as np

from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.rates import Rates

__all__ = ["LATE", "late_stages"]

LATE = 0.01


def late_stages(plan: StepPlan, load: StepLoad, rates: Rates) -> frozenset[Stage]:
    """Stages in which copies are late by more than LATE of the time of all layers.

    Lateness is how much longer the busiest link takes than the layer itself, as the planner prices it. The second link
    is not free: weights are written to it every step.
    """
    num_ranks = plan.cluster.num_ranks
    late = []
    for stage in Stage:
        copies, rows_CR = plan.stages[stage], plan.rank_load(load, stage).reshape(-1, num_ranks)
        at = copies.problem_of_copy() * num_ranks
        received, sent = (np.bincount(at + ends, minlength=rows_CR.size) for ends in (copies.rank, copies.origin))
        link_us = np.maximum(received, sent).reshape(-1, num_ranks).max(axis=1) * rates.link_us[stage]
        layer_us = rows_CR.max(axis=1) * rates.row_us[stage] + rows_CR.mean(axis=1) * rates.gap_row_us[stage]
        hidden_us = layer_us + rates.gap_us[stage]
        if np.maximum(link_us - hidden_us, 0.0).sum() > LATE * hidden_us.sum():
            late.append(stage)
    return frozenset(late)
