"""Pace: the machine that a measured step ran on, as far as the events of the step tell.

A balanced step cannot separate what an operation costs at all from what each row adds: every rank has the same rows. So
launches and latencies stay those of a base machine, and its rates get one factor for every kind of work, such that the
predicted time of that kind in the measured micro-batch is the measured one. Kinds: experts forward, experts backward,
attention with the other dense parts, and all-to-alls. An all-to-all is measured as a whole, so links inside and across
nodes have one rate. Reordering rows is part of the kinds it was measured in, so device memory is set to cost nothing;
an optimizer step, the same for every plan, is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import SequenceLoad
from equilibra.core.plan import StepPlan
from equilibra.cost.prices import ExpertLaw, Prices
from equilibra.events.run import PlannerRecord
from equilibra.events.schema import Direction, Events, Kind
from equilibra.simulate.predict import predict
from equilibra.simulate.times import Pricing

__all__ = ["paced", "window_of"]

FREE_GB_PER_S = 1e9
EXPERTS_FORWARD, EXPERTS_BACKWARD, DENSE, EXCHANGE = "experts_forward", "experts_backward", "dense", "exchange"


class _Took(NamedTuple):
    """Events of one kind."""

    us: float
    """all of them together"""
    events: int
    """how many"""


def window_of(measured: PlannerRecord) -> int:
    """The micro-batch whose events were kept."""
    return int(measured.events.rows["micro_batch"].max(initial=0))


def paced(
    measured: PlannerRecord, plan: StepPlan, sequences: SequenceLoad, pricing: Pricing, *, spare_slots: int
) -> Pricing:
    """The pricing with the rates of the machine that ran the plan; kinds of which there are no events stay."""
    base = pricing.hardware
    base = replace(base, hbm_gb_per_s=FREE_GB_PER_S, nvlink_gb_per_s=base.nic_gb_per_s)
    pricing = replace(pricing, hardware=base)
    said = predict(plan, sequences, pricing, spare_slots=spare_slots, window=window_of(measured))
    took, expected = _took(measured.events), _took(said.events)
    latency_us = base.nic_latency_us if pricing.cluster.num_nodes > 1 else base.nvlink_latency_us
    fixed_us = {
        EXPERTS_FORWARD: base.experts_forward.fixed_us, EXPERTS_BACKWARD: base.experts_backward.fixed_us, DENSE: 0.0,
        EXCHANGE: latency_us,
    }  # fmt: skip
    slower = {kind: _factor(took[kind], expected[kind], fixed_us[kind]) for kind in fixed_us}
    return replace(pricing, hardware=_slowed(base, slower))


def _took(events: Events) -> dict[str, _Took]:
    """Time and number of events, by kind; an all-to-all is as long as for the rank that came last to it."""
    rows = events.rows[events.rows["micro_batch"] >= 0]
    kind, backward = rows["kind"], rows["direction"] == Direction.BACKWARD
    us = rows["end_us"] - rows["start_us"]
    chosen = {
        EXPERTS_FORWARD: (kind == Kind.EXPERTS) & ~backward, EXPERTS_BACKWARD: (kind == Kind.EXPERTS) & backward,
        DENSE: kind == Kind.ATTENTION,
    }  # fmt: skip
    found = {name: _Took(float(us[of].sum()), int(of.sum())) for name, of in chosen.items()}
    exchanges = np.isin(kind, (Kind.DISPATCH, Kind.COMBINE))
    found[EXCHANGE] = _shortest(rows[exchanges], us[exchanges])
    return found


def _shortest(rows: NDArray[np.void], us: NDArray[np.float64]) -> _Took:
    """Of every all-to-all the shortest event."""
    keys = rows[["kind", "stage", "direction", "layer", "micro_batch"]]
    _, number = np.unique(keys, return_inverse=True)
    least = np.full(int(number.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, number.ravel(), us)
    return _Took(float(least.sum()), least.size)


def _factor(took: _Took, expected: _Took, fixed_us: float) -> float:
    """How many times as long an event takes as expected, apart from what is fixed; 1 where that cannot be told."""
    if not took.events or not expected.events:
        return 1.0
    own, base = took.us / took.events - fixed_us, expected.us / expected.events - fixed_us
    return own / base if own > 0 and base > 1e-9 else 1.0


def _slowed(base: Prices, slower: Mapping[str, float]) -> Prices:
    def law(of: ExpertLaw, factor: float) -> ExpertLaw:
        return of.scaled(compute=1 / factor, memory=1 / factor)

    dense, exchange = slower[DENSE], slower[EXCHANGE]
    return replace(
        base, name="measured", source="rates of the measured step",
        experts_forward=law(base.experts_forward, slower[EXPERTS_FORWARD]),
        experts_backward=law(base.experts_backward, slower[EXPERTS_BACKWARD]),
        dense_tflops=base.dense_tflops / dense, attention_tflops=base.attention_tflops / dense,
        attention_backward_tflops=base.attention_backward_tflops / dense,
        nvlink_gb_per_s=base.nvlink_gb_per_s / exchange, nic_gb_per_s=base.nic_gb_per_s / exchange,
    )  # fmt: skip
