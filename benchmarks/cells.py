"""Cells of the papers' tables: one model, cluster and kind of prompts each, simulated under every planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.suite import Row, Setting
from equilibra.core.checks import PlanLimits
from equilibra.core.load import SequenceLoad
from equilibra.core.model import MODELS, MoEModel
from equilibra.core.placement import Cluster
from equilibra.cost.presets import prices_named
from equilibra.plan.planner import Planner
from equilibra.simulate.entry import Question, simulate
from equilibra.simulate.times import RunSetting
from equilibra.trace.open import load_trace
from equilibra.trace.routing import RoutingTrace
from equilibra.trace.synth import SynthKnobs, SynthShape, fit_knobs, synthesize_loads

# `fit_knobs` on gpt-oss-20b.npz: the whole recording, and the mean over eight runs of neighbouring sequences, which in
# that recording are of one domain. --traces fits anew.
MIXED = SynthKnobs(popularity_skew=0.847, sequence_noise=1.018, group_correlation=0.355)
SINGLE = SynthKnobs(popularity_skew=0.940, sequence_noise=0.898, group_correlation=0.142)
DOMAINS = 8
LENGTHS = SynthKnobs(median_length=3000.0, length_tail=0.6, max_length=12_288)
SLOTS = PlanLimits(spare_slots=4, standing_slots=2)
BASELINES: tuple[str, ...] = ("static", "eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of a table."""

    model: str
    """preset"""
    nodes: int
    knobs: SynthKnobs
    """kind of prompts"""
    seed: int = 1
    ranks_per_node: int = 8
    sequences: int = 1024
    micro_batches: int = 32
    data_parallel: int = 1
    """expert-parallel groups"""
    slots: PlanLimits = SLOTS
    """slots for copies"""
    planners: tuple[str | Planner, ...] = BASELINES
    """planners that are compared"""


@cache
def knobs_of_prompts(traces: Path | None) -> dict[str, SynthKnobs]:
    """Routing skew of single-domain and of mixed prompts."""
    single, mixed = SINGLE, MIXED
    if traces is not None:
        trace = load_trace(traces / "gpt-oss-20b.npz")
        assert isinstance(trace, RoutingTrace)
        cuts = [trace.num_sequences * i // DOMAINS for i in range(DOMAINS + 1)]
        parts = [fit_knobs(_slice(trace, first, last)) for first, last in pairwise(cuts)]
        single, mixed = _mean(parts), fit_knobs(trace)
    return {"single": _skew_of(single), "mixed": _skew_of(mixed)}


def _mean(parts: list[SynthKnobs]) -> SynthKnobs:
    return SynthKnobs(
        popularity_skew=float(np.mean([part.popularity_skew for part in parts])),
        sequence_noise=float(np.mean([part.sequence_noise for part in parts])),
        group_correlation=float(np.mean([part.group_correlation for part in parts])),
    )


def _skew_of(knobs: SynthKnobs) -> SynthKnobs:
    """Synthetic routing with this skew and the answer lengths of RL."""
    return replace(
        LENGTHS, popularity_skew=knobs.popularity_skew, sequence_noise=knobs.sequence_noise,
        group_correlation=knobs.group_correlation,
    )  # fmt: skip


def _slice(trace: RoutingTrace, first: int, last: int) -> RoutingTrace:
    start, stop = int(trace.offsets[first]), int(trace.offsets[last])
    offsets = trace.offsets[first : last + 1] - start
    return RoutingTrace(ids=trace.ids[start:stop], offsets=offsets, num_experts=trace.num_experts)


def _model(name: str, setting: Setting) -> MoEModel:
    return replace(MODELS[name], num_layers=4) if setting.quick else MODELS[name]


def _loads(model: MoEModel, case: Case, step: int) -> SequenceLoad:
    size = SynthShape(
        num_prompts=-(-case.sequences // 16), answers_per_prompt=16, num_layers=model.num_layers,
        num_experts=model.num_experts, top_k=model.top_k,
    )  # fmt: skip
    return synthesize_loads(size, case.knobs, seed=case.seed, step=step)


def metrics_of(case: Case, setting: Setting) -> dict[str, dict[str, float]]:
    """Figures of every planner in one cell."""
    model = _model(case.model, setting)
    loads = _loads(model, case, 1)
    tokens = int(loads.length_of_sequence.sum())
    question = Question(
        sequences=loads,
        model=model,
        hardware=prices_named("h100"),
        cluster=Cluster(num_nodes=case.nodes, ranks_per_node=case.ranks_per_node),
        # Whole sequences leave micro-batches partly empty: a budget for one fewer gives the requested number.
        tokens_per_microbatch=-(-tokens // case.data_parallel // max(case.micro_batches - 1, 1)),
        planners=case.planners,
        limits=case.slots,
        setting=RunSetting(data_parallel=case.data_parallel),
        history_LE=_loads(model, case, 0).tokens_SLE.sum(axis=0, dtype=np.int64),
    )
    return simulate(question, keep_records=False).metrics


def row_of(metrics: dict[str, dict[str, float]]) -> Row:
    """The columns that most tables share."""
    ours, step = metrics["equilibra"], {name: figures["step_time_s"] for name, figures in metrics.items()}
    row: Row = {"imbalance_static": metrics["static"]["imbalance_mean"]}
    for name in ("eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra", "balanced"):
        if name in metrics:
            row[f"{name}_x"] = metrics[name]["speedup_over_static"]
    row["share_of_balanced"] = ours["share_of_balanced"]
    if "eplb-oracle" in step:
        row["over_eplb_oracle"] = step["eplb-oracle"] / step["equilibra"]
    row["exposed"] = ours["exposed_overhead_s"] / ours["step_time_s"]
    return row


def mean_of_seeds(case: Case, setting: Setting) -> Row:
    """The row of means over seeds, with the worst share of balanced."""
    seeds = (1,) if setting.quick else (1, 2, 3)
    rows = [row_of(metrics_of(replace(case, seed=seed), setting)) for seed in seeds]
    mean: Row = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return {**mean, "share_worst_seed": min(row["share_of_balanced"] for row in rows), "seeds": len(seeds)}
