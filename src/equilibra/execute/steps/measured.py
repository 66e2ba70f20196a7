"""A measured step as a record that `equilibra report` shows, beside predicted ones.

Symbols: L layers, M micro-batches, R ranks, P passes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.events.imbalance import imbalance, spread
from equilibra.events.run import PASSES, PlannerRecord, columns_of_plan
from equilibra.events.schema import Direction, Events, Kind

__all__ = ["executed_rows", "measured_record"]


def executed_rows(rows: NDArray[np.void], shape: tuple[int, int, int], stage: Stage) -> NDArray[np.int64]:
    """[L, M, R] pairs that each rank's experts computed in a stage's forward pass, from its events."""
    chosen = rows[
        (rows["kind"] == Kind.EXPERTS) & (rows["stage"] == stage.number) & (rows["direction"] == Direction.FORWARD)
        & (rows["micro_batch"] >= 0)
    ]  # fmt: skip
    counted = np.zeros(shape, np.int64)
    np.add.at(counted, (chosen["layer"], chosen["micro_batch"], chosen["rank"]), chosen["tokens"])
    return counted


def measured_record(
    plan: StepPlan,
    load: StepLoad,
    rows: NDArray[np.void],
    *,
    memory: dict[str, float],
    seconds: float,
    num_tokens: int,
) -> PlannerRecord:
    """The record of one step from all ranks' events. Token counts are what ran, not what was planned."""
    shape = (plan.num_layers, plan.num_micro_batches, plan.cluster.num_ranks)
    ran_LMR = executed_rows(rows, shape, Stage.UPDATE)
    window = plan.num_micro_batches // 2
    shown = rows[(rows["micro_batch"] == window) | (rows["micro_batch"] < 0)]
    return PlannerRecord(
        metrics={
            "step_time_s": seconds,
            "throughput_tokens_per_s": num_tokens / seconds if seconds > 0 else 0.0,
            **_metrics(plan, ran_LMR, rows),
        },
        memory=memory,
        rank_tokens_LMR=ran_LMR.astype(np.int32),
        **columns_of_plan(plan, load),
        layer_us_PLM=_layer_us(rows, shape),
        events=Events.of(shown),
    )


def _metrics(plan: StepPlan, ran_LMR: NDArray[np.int64], rows: NDArray[np.void]) -> dict[str, float]:
    problems = plan.num_layers * plan.num_micro_batches
    ratio = spread(imbalance(ran_LMR))
    bound = float(plan.bound_LM.sum())
    flash, standing = plan.stages[Stage.UPDATE].num_copies / problems, plan.standing.num_copies / plan.num_layers
    waited = rows[np.isin(rows["kind"], (Kind.WAIT, Kind.PLAN, Kind.MIGRATION, Kind.COUNTS))]
    by_rank = np.bincount(waited["rank"], weights=waited["end_us"] - waited["start_us"], minlength=1)
    return {
        "imbalance_mean": ratio.mean,
        "imbalance_p99": ratio.p99,
        "slowest_rank_over_bound": float(ran_LMR.max(axis=2).sum()) / bound if bound else 1.0,
        "copies_per_layer": flash + standing,
        "flash_copies_per_layer": flash,
        "standing_copies_per_layer": standing,
        "migration_bytes": float(rows["bytes"][rows["kind"] == Kind.MIGRATION].sum()),
        "exposed_overhead_s": float(by_rank.max()) * 1e-6,
        "micro_batches": float(plan.num_micro_batches),
    }


def _layer_us(rows: NDArray[np.void], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """[P, L, M] from the first to the last moment of each pass through each layer, over all ranks."""
    layers, micro_batches, _ = shape
    of_layer = rows[(rows["layer"] >= 0) & (rows["micro_batch"] >= 0) & (rows["kind"] != Kind.ATTENTION)]
    backward = of_layer["direction"] != Direction.FORWARD
    number = np.where(of_layer["stage"] == Stage.LOGPROB.number, 0, np.where(backward, 2, 1))
    first = np.full((len(PASSES), layers, micro_batches), np.inf)
    last = np.zeros_like(first)
    np.minimum.at(first, (number, of_layer["layer"], of_layer["micro_batch"]), of_layer["start_us"])
    np.maximum.at(last, (number, of_layer["layer"], of_layer["micro_batch"]), of_layer["end_us"])
    return np.where(np.isfinite(first), last - first, 0.0).astype(np.float32)
