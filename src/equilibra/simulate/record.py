"""Records of a simulated step for reports: exact counts, times, and the events of one micro-batch.

Symbols: S stages, L layers, M micro-batches, R ranks, E experts, N nodes, W recorded visits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from equilibra.core.plan import Stage, StagePlan, StandingCopies
from equilibra.events.run import PlannerRecord, columns_of_plan
from equilibra.events.schema import Direction, Events, Kind, Resource, event_table
from equilibra.simulate.step import GroupResult
from equilibra.simulate.timeline import StageRecord
from equilibra.simulate.times import Pricing, Times

Table = NDArray[np.void]


def planner_record(result: GroupResult, pricing: Pricing, metrics: dict[str, float]) -> PlannerRecord:
    """The record of one planner's step."""
    plan = result.plan
    rows_SLMR = np.stack([plan.rank_load(result.load, stage) for stage in Stage])
    records = result.timeline.records
    tables = [_stage_events(record, result.times, pricing, rows_SLMR) for record in records]
    tables += [
        _flash_of_visit(result, pricing, record, w, visit)
        for record in records
        for w, visit in enumerate(record.chosen.tolist())
    ]
    tables.append(_step_events(result, pricing))
    return PlannerRecord(
        metrics=metrics,
        memory=result.memory,
        rank_tokens_LMR=rows_SLMR[Stage.UPDATE.number].astype(np.int32),
        **columns_of_plan(plan, result.load),
        layer_us_PLM=result.timeline.layer_us_PLM.astype(np.float32),
        events=Events.of(*chain(*tables)),
    )


def balanced_record(result: GroupResult, pricing: Pricing, metrics: dict[str, float]) -> PlannerRecord:
    """The record of the same step under perfect balance: every rank has the rounded mean."""
    plan = result.plan
    rows_LMR = plan.rank_load(result.load)
    even = np.broadcast_to(np.rint(rows_LMR.mean(axis=2, keepdims=True)), rows_LMR.shape).astype(np.int32)
    no_tokens_CMR = np.zeros((0, plan.num_micro_batches, plan.cluster.num_ranks), np.int32)
    bare = replace(
        plan, placement=plan.previous, standing=StandingCopies.none(),
        stages=dict.fromkeys(Stage, StagePlan.without_flash(no_tokens_CMR, plan.num_layers)),
    )  # fmt: skip
    rows_SLMR = np.stack([even, even])
    tables = [_stage_events(record, result.ideal_times, pricing, rows_SLMR) for record in result.ideal_timeline.records]
    return PlannerRecord(
        metrics=metrics,
        memory=result.ideal_memory,
        rank_tokens_LMR=even,
        **columns_of_plan(bare, result.load),
        layer_us_PLM=result.ideal_timeline.layer_us_PLM.astype(np.float32),
        events=Events.of(*chain(*tables)),
    )


def _stage_events(record: StageRecord, times: Times, pricing: Pricing, rows_SLMR: NDArray[np.integer]) -> list[Table]:
    """Attention, dispatch, experts, combine and waiting of a pipeline stage's recorded visits."""
    visits, chosen = record.visits, record.chosen
    if chosen.size == 0:
        return []
    attention_start, attention_end, got, start, end, combined = np.moveaxis(record.times_us, 2, 0)
    num_ranks = got.shape[1]
    where = visits.stage[chosen], visits.layer[chosen], visits.micro_batch[chosen]
    inside, across = times.inside_us[where], times.across_us[where]
    moved = np.maximum(inside, across)
    backward = (visits.direction[chosen] == Direction.BACKWARD)[:, None] & np.ones(num_ranks, np.bool_)
    opened = got - moved.max(axis=1, keepdims=True)  # when bytes of the first all-to-all start to move
    closed = np.broadcast_to(end.max(axis=1, keepdims=True), end.shape)
    arrived = np.where(backward, opened - times.latency_us, attention_end)
    link = np.where(across >= inside, int(Resource.NIC), int(Resource.NVLINK))
    num_bytes = (moved / 1e-3 * np.where(
        across >= inside, pricing.hardware.nic_gb_per_s, pricing.hardware.nvlink_gb_per_s
    )).round()  # fmt: skip
    first = np.where(backward, int(Kind.COMBINE), int(Kind.DISPATCH))
    last = np.where(backward, int(Kind.DISPATCH), int(Kind.COMBINE))
    rows = rows_SLMR[where]

    def table(kind: object, resource: object, begin: object, finish: object, **columns: object) -> Table:
        every = event_table(got.size)
        for name, values in (
            ("stage", where[0][:, None]), ("direction", visits.direction[chosen][:, None]),
            ("layer", where[1][:, None]), ("micro_batch", where[2][:, None]), ("rank", np.arange(num_ranks)),
            ("kind", kind), ("resource", resource), ("start_us", begin), ("end_us", finish), *columns.items(),
        ):  # fmt: skip
            every[name] = np.broadcast_to(np.asarray(values), got.shape).ravel()
        return every[every["end_us"] > every["start_us"] + 1e-6]  # less is rounding

    found = [
        table(Kind.ATTENTION, Resource.COMPUTE, attention_start, attention_end),
        table(first, link, np.maximum(opened - times.latency_us, 0), got, bytes=num_bytes),
        table(Kind.WAIT, Resource.COMPUTE, got, start),
        table(Kind.EXPERTS, Resource.COMPUTE, start, end, tokens=rows),
        table(Kind.WAIT, Resource.COMPUTE, end, closed),
        table(last, link, closed, combined, bytes=num_bytes),
    ]
    forward = (visits.direction[chosen] == Direction.FORWARD)[:, None]
    before = opened - times.latency_us
    counted = np.where(forward, before - times.counts_us, before)
    found.append(table(Kind.WAIT, Resource.COMPUTE, np.minimum(arrived, counted), np.maximum(counted, arrived)))
    if times.counts_us > 0:
        found.append(table(Kind.COUNTS, Resource.COMPUTE, np.maximum(counted, 0), before))
    return found


def _flash_of_visit(result: GroupResult, pricing: Pricing, record: StageRecord, w: int, visit: int) -> list[Table]:
    """Flash copies of a recorded visit and their returning gradients."""
    stage, direction, layer, m = (int(column[visit]) for column in record.visits[:4])
    copies = result.plan.visit(Stage.numbered(stage), m, layer)
    count = copies.flash_rank.size
    if count == 0:
        return []
    node = copies.flash_rank // pricing.cluster.ranks_per_node
    times, setting = result.times, pricing.setting
    common = {
        "stage": stage, "direction": direction, "layer": layer, "micro_batch": m, "rank": copies.flash_rank,
        "peer": copies.flash_origin, "expert": copies.flash_expert,
        "tokens": copies.flash_tokens_FR.sum(axis=1, dtype=np.int64),
    }  # fmt: skip
    found = []
    if direction != Direction.BACKWARD or not setting.activation_recompute:
        took = times.flash_us[stage, layer, m, node]
        exposed = times.exposed_copies and direction == Direction.FORWARD
        ready = record.times_us[w, copies.flash_rank, 3] if exposed else record.ready_us[node, visit]
        link = Resource.HOST_LINK if times.host_path[stage] else Resource.COPY_ENGINE
        found.append(event_table(
            count, kind=Kind.FLASH_COPY, resource=link, bytes=pricing.model.expert_bytes,
            start_us=np.maximum(ready - took, 0.0), end_us=np.maximum(ready, took), **common,
        ))  # fmt: skip
    if direction == Direction.BACKWARD:
        leaves = float(record.times_us[w, :, 4].max())
        found.append(event_table(
            count, kind=Kind.FLASH_GRADIENT, resource=Resource.COPY_ENGINE, bytes=pricing.model.expert_gradient_bytes,
            start_us=leaves, end_us=leaves + times.flash_return_us[layer, m, node], **common,
        ))  # fmt: skip
    return found


def _step_events(result: GroupResult, pricing: Pricing) -> list[Table]:
    """Once-a-step events: planning, standing copies, moved homes, the optimizer."""
    plan, times, model = result.plan, result.times, pricing.model
    found = []
    ready_L = np.zeros(plan.num_layers)
    for record in result.timeline.records:
        layers, first = np.unique(record.visits.layer, return_index=True)
        ready_L[layers] = np.maximum(record.net_ready_us[first], record.ready_us[:, first].max(axis=0))
    planned = times.plan_ready_us
    if planned.any():
        waves = np.unique(planned)
        begin = np.concatenate([[0.0], waves])[np.searchsorted(waves, planned)]
        found.append(event_table(
            plan.num_layers, kind=Kind.PLAN, resource=Resource.CPU, rank=0, layer=np.arange(plan.num_layers),
            start_us=begin, end_us=planned,
        ))  # fmt: skip
    standing, home, group = plan.standing, plan.placement.home_of_expert, pricing.cluster.ranks_per_node
    layer, expert = np.nonzero(home != plan.previous.home_of_expert)
    for kind, of_layer, of_expert, target, origin, num_bytes in (
        (Kind.STANDING_COPY, standing.layer, standing.expert, standing.rank, home[standing.layer, standing.expert],
         model.expert_bytes),
        (Kind.MIGRATION, layer, expert, home[layer, expert], plan.previous.home_of_expert[layer, expert],
         model.expert_home_bytes),
    ):  # fmt: skip
        inside = target // group == origin // group
        rate = np.where(inside, pricing.hardware.nvlink_gb_per_s, pricing.hardware.nic_gb_per_s)
        took = num_bytes * 1e-3 / rate
        end = np.maximum(ready_L[of_layer], took)
        found.append(event_table(
            of_layer.size, kind=kind, resource=np.where(inside, Resource.NVLINK, Resource.NIC), layer=of_layer,
            rank=target, peer=origin, expert=of_expert, bytes=num_bytes, start_us=end - took, end_us=end,
        ))  # fmt: skip
    finish = result.timeline.step_us
    found.append(event_table(
        pricing.cluster.num_ranks, kind=Kind.OPTIMIZER, resource=Resource.COMPUTE, stage=Stage.UPDATE.number,
        rank=np.arange(pricing.cluster.num_ranks), start_us=max(finish - times.optimizer_us, 0.0), end_us=finish,
    ))  # fmt: skip
    return found
