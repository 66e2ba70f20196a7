"""What rows, copies and moves cost on this machine, so that the planner weighs what is true here.

The runtime bench measures a layer of the same experts with as many rows (in processor time). A move carries an expert
with two moments of Adam: three times the values of a copy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.runtime.case import CLUSTER, Case, Shape
from benchmarks.runtime.contenders import balanced_routing, counted
from benchmarks.runtime.layers import RankLayers
from benchmarks.runtime.rank import measured_rates
from benchmarks.train.setting import TrainSetting
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.group import ExpertGroup

__all__ = ["measured_prices"]

CARRIED = 3
"""tensors that move with a home: weights and two moments"""


def measured_prices(setting: TrainSetting, group: ExpertGroup) -> Rates:
    """Collective: prices, the same on every rank."""
    nothing_TLK = np.zeros((setting.tokens_per_rank, 1, setting.top_k), np.int64)
    routing = balanced_routing([[nothing_TLK] * CLUSTER.num_ranks], setting.experts)
    case = Case(
        name="prices", experts_MR=routing, load=counted(routing, setting.experts), top_k=setting.top_k, layers=[0],
        notes=[],
    )  # fmt: skip
    shape = Shape(hidden=setting.hidden, ffn=setting.ffn, spare_slots=setting.spare_slots, path=setting.path, repeats=1)
    rates = measured_rates(RankLayers(case, shape, group), case)
    move_us = CARRIED * rates.flash_copy_us[Stage.LOGPROB]
    return replace(rates, move_us=move_us, move_inside_us=move_us)
