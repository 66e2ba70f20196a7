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
    late = []
    for stage in Stage:
        rows_PR = plan.rank_load(load, stage).reshape(-1, plan.cluster.num_ranks)
        link_us = np.maximum(*plan.stages[stage].on_links()).max(axis=1) * rates.link_us[stage]
        layer_us = rows_PR.max(axis=1) * rates.row_us[stage] + rows_PR.mean(axis=1) * rates.gap_row_us[stage]
        hidden_us = layer_us + rates.gap_us[stage]
        if np.maximum(link_us - hidden_us, 0.0).sum() > LATE * hidden_us.sum():
            late.append(stage)
    return frozenset(late)
