"""Runs to test the report with: real plans of synthetic steps, with times and events that are made up but consistent.

The times follow one simple rule (a fixed time per (token, expert) pair, dispatch and combine of fixed length, copies
that online planners show and planned ones hide), so that the timeline looks like one. They predict nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from equilibra.core.load import imbalance, spread
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StepPlan
from equilibra.events.run import PASSES, PlannerRecord, Run
from equilibra.events.schema import EVENT, Direction, Events, Kind, Resource, event_table
from equilibra.plan.entry import step_problem
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads

US_PER_PAIR, ATTENTION_US, DISPATCH_US, COPY_US = 0.05, 400.0, 120.0, 180.0
EXPERT_BYTES = 3 * 2048 * 768 * 2
PASS_OF = (
    (Stage.LOGPROB.number, Direction.FORWARD, 1.0),
    (Stage.UPDATE.number, Direction.FORWARD, 1.0),
    (Stage.UPDATE.number, Direction.BACKWARD, 2.0),
)
ONLINE = ("ultraep", "llep")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a run to make."""

    layers: int = 4
    nodes: int = 2
    ranks_per_node: int = 4
    experts: int = 32
    top_k: int = 4
    prompts: int = 8
    answers: int = 8
    tokens_per_rank: int = 1024
    median_length: float = 300.0
    seed: int = 3

    @property
    def cluster(self) -> Cluster:
        return Cluster(num_nodes=self.nodes, ranks_per_node=self.ranks_per_node)


SMALL = Size()
TINY = Size(layers=1, nodes=1, ranks_per_node=2, experts=4, top_k=2, prompts=1, answers=2)
FULL = Size(layers=94, nodes=8, ranks_per_node=8, experts=128, top_k=8, prompts=84, answers=32, tokens_per_rank=8192,
            median_length=4096.0)  # fmt: skip
PLANNERS = ("static", "eplb-oracle", "ultraep", "equilibra", "balanced")
ALL_PLANNERS = ("static", "lpt", "eplb-history", "eplb-oracle", "ultraep", "equilibra", "balanced")
HOSTILE = '</script><img src=x onerror="window.hacked=1">\u2028<!--<script>&"'


def make_run(size: Size = SMALL, planners: tuple[str, ...] = PLANNERS) -> Run:
    """A simulated run of these planners on one synthetic step."""
    shape = SynthShape(
        num_prompts=size.prompts, answers_per_prompt=size.answers, num_layers=size.layers,
        num_experts=size.experts, top_k=size.top_k,
    )  # fmt: skip
    knobs = SynthKnobs(median_length=size.median_length, max_length=size.tokens_per_rank)
    loads = synthesize_loads(shape, knobs, seed=size.seed)
    problem = step_problem(loads, cluster=size.cluster, tokens_per_rank=size.tokens_per_rank)
    records: dict[str, PlannerRecord] = {}
    for name in planners:
        history = replace(problem, history_LE=loads.tokens_SLE[::2].sum(axis=0, dtype=np.int64))
        records[name] = _record(planner_named(name).plan(history), history)
    _add_comparisons(records)
    return Run(about=about(size, loads.length_of_sequence), planners=records)


def about(size: Size, lengths: np.ndarray) -> dict:
    return {
        "kind": "simulated",
        "command": "equilibra simulate --trace routing.npz --model test-moe --output run",
        "version": "0.1.0",
        "model": {
            "name": "test-moe", "num_layers": size.layers, "num_experts": size.experts, "top_k": size.top_k,
            "hidden": 2048, "expert_ffn": 768,
        },
        "hardware": {"name": "H200 (SXM)", "memory_bytes": 141e9, "source": "vendor data sheet"},
        "cluster": {"num_nodes": size.nodes, "ranks_per_node": size.ranks_per_node},
        "settings": {"tokens_per_rank": size.tokens_per_rank, "spare_slots": 2, "standing_slots": 2},
        "inputs": [{"path": "routing.npz", "sha256": "0" * 64}],
        "tokens": int(lengths.sum()),
        "sequences": int(lengths.size),
        "window": {"micro_batch": 0},
        "warnings": ["The times of this run are made up: it is a fixture of the tests."],
    }  # fmt: skip


def hostile_run() -> Run:
    """A run in which every string tries to be HTML, one planner is unknown, and keys are missing."""
    run = make_run(TINY, ("static", "equilibra"))
    record = run.planners["equilibra"]
    nasty = replace(
        record,
        metrics={**record.metrics, HOSTILE: 1.0},
        memory={**record.memory, HOSTILE: 1e9},
    )
    strings = {
        "kind": HOSTILE, "command": HOSTILE, "version": HOSTILE, "model": {"name": HOSTILE, HOSTILE: HOSTILE},
        "hardware": {"name": HOSTILE, "source": HOSTILE}, "settings": {HOSTILE: HOSTILE},
        "inputs": [{"path": HOSTILE}], "warnings": [HOSTILE],
    }  # fmt: skip
    return Run(about=strings, planners={"static": run.planners["static"], "equilibra": nasty, "of-my-own": nasty})


def _record(plan: StepPlan, problem: StepProblem) -> PlannerRecord:
    load = problem.load_under(plan.schedule)
    stage = plan.stages[Stage.UPDATE]
    rank_tokens = plan.rank_load(load).astype(np.int32)
    slowest_us = rank_tokens.max(axis=2) * US_PER_PAIR
    extra = COPY_US + 40.0 if plan.planner in ONLINE else 0.0
    layer_us = np.stack([ATTENTION_US + 2 * DISPATCH_US + extra + slowest_us * scale for _, _, scale in PASS_OF])
    micro_batch = int(imbalance(rank_tokens).mean(axis=0).argmax())
    overhead_s = extra * layer_us.size / 1e6
    ideal = plan.planner == "balanced"
    empty = np.zeros(0, np.int32)
    flash = slice(0, 0) if ideal else slice(None)
    first = np.zeros_like(stage.first_of_problem) if ideal else stage.first_of_problem
    imbalances = spread(imbalance(rank_tokens))
    copies = 0 if ideal else stage.num_copies + plan.standing.num_copies
    memory = {"weights": 31e9, "gradients": 22e9, "optimizer_state": 41e9, "activations": 18e9}
    memory |= {"copies": 0.0} if plan.planner in ("static", "balanced") else {"copies": 2.4e9}
    return PlannerRecord(
        metrics={
            "step_time_s": float(layer_us.sum() / 1e6),
            "imbalance_mean": imbalances.mean,
            "imbalance_p99": imbalances.p99,
            "copies_per_layer": copies / (plan.num_layers * plan.num_micro_batches),
            "copy_bytes": float(copies * EXPERT_BYTES),
            "migration_bytes": float(plan.migration.num_moves * EXPERT_BYTES * 7),
            "exposed_overhead_s": overhead_s,
            "peak_memory_bytes": sum(memory.values()),
        },
        memory=memory,
        rank_tokens_LMR=rank_tokens,
        expert_tokens_LME=np.ascontiguousarray(load.expert_load().transpose(1, 0, 2)).astype(np.int32),
        home_of_expert_LE=plan.placement.home_of_expert.astype(np.int32),
        flash_first_of_problem=first,
        flash_expert=stage.expert[flash],
        flash_rank=stage.rank[flash],
        flash_origin=stage.origin[flash],
        flash_tokens=stage.tokens_FR.sum(axis=1).astype(np.int32)[flash],
        standing_layer=empty if ideal else plan.standing.layer,
        standing_expert=empty if ideal else plan.standing.expert,
        standing_rank=empty if ideal else plan.standing.rank,
        standing_tokens_CM=np.zeros((0, plan.num_micro_batches), np.int32)
        if ideal
        else stage.standing_tokens_CMR.sum(axis=2).astype(np.int32),
        layer_us_PLM=layer_us.astype(np.float32),
        bound_LM=plan.bound_LM,
        events=_events(plan, rank_tokens[:, micro_batch], micro_batch, slowest_us.sum(), ideal=ideal),
    )


def _add_comparisons(records: dict[str, PlannerRecord]) -> None:
    tokens = next(iter(records.values())).expert_tokens_LME[0].sum()
    for record in records.values():
        metrics, step = record.metrics, record.metrics["step_time_s"]
        metrics["throughput_tokens_per_s"] = float(tokens / step)
        if "static" in records:
            metrics["speedup_over_static"] = records["static"].metrics["step_time_s"] / step
        if "balanced" in records:
            metrics["share_of_balanced"] = records["balanced"].metrics["step_time_s"] / step


def _events(plan: StepPlan, tokens_LR: np.ndarray, micro_batch: int, start_us: float, *, ideal: bool) -> Events:
    """Three passes through all layers of one micro-batch on every rank."""
    num_layers, num_ranks = tokens_LR.shape
    ranks, parts, now = np.arange(num_ranks), [], start_us
    first = plan.stages[Stage.UPDATE].first_of_problem
    for number, (stage, direction, scale) in enumerate(PASS_OF):
        order = range(num_layers) if direction == Direction.FORWARD else range(num_layers - 1, -1, -1)
        for layer in order:
            common = {
                "stage": stage, "direction": direction, "layer": layer, "micro_batch": micro_batch, "rank": ranks
            }  # fmt: skip

            def span(kind: Kind, resource: Resource, start, end, common=common, **more) -> None:
                count = num_ranks if "rank" not in more else len(more["rank"])
                columns = {**common, "kind": kind, "resource": resource, "start_us": start, "end_us": end, **more}
                parts.append(event_table(count, **columns))

            online = plan.planner in ONLINE
            problem = layer * plan.num_micro_batches + micro_batch
            chosen = slice(0, 0) if ideal else slice(first[problem], first[problem + 1])
            copy_end = _flash(plan, chosen, now + ATTENTION_US + 40.0 if online else now, span, direction)
            span(Kind.ATTENTION, Resource.COMPUTE, now, now + ATTENTION_US)
            now += ATTENTION_US
            if online:
                span(Kind.COUNTS, Resource.NVLINK, now, now + 30.0)
                span(Kind.PLAN, Resource.COMPUTE, now + 30.0, now + 40.0)
                span(Kind.WAIT, Resource.COMPUTE, now + 40.0, max(copy_end, now + 41.0))
                now = max(copy_end, now + 41.0)
            span(Kind.DISPATCH, Resource.NVLINK, now, now + DISPATCH_US, bytes=tokens_LR[layer].astype(np.int64) * 4096)
            now += DISPATCH_US
            done = now + tokens_LR[layer] * US_PER_PAIR * scale
            span(Kind.EXPERTS, Resource.COMPUTE, now, done, tokens=tokens_LR[layer])
            late = np.flatnonzero(done < done.max())
            span(Kind.WAIT, Resource.COMPUTE, done[late], done.max(), rank=late)
            now = float(done.max())
            span(Kind.COMBINE, Resource.NVLINK, now, now + DISPATCH_US, bytes=tokens_LR[layer].astype(np.int64) * 4096)
            now += DISPATCH_US
        assert number < len(PASSES)
    once = event_table(num_ranks, kind=Kind.OPTIMIZER, resource=Resource.COMPUTE, stage=Stage.UPDATE.number, rank=ranks,
                       start_us=now + 5e5, end_us=now + 5e5 + 2000)  # fmt: skip
    return Events.of(np.zeros(0, EVENT), *parts, once)


def _flash(plan: StepPlan, chosen: slice, start: float, span, direction: Direction) -> float:
    """Copies into one rank follow each other."""
    stage = plan.stages[Stage.UPDATE]
    rank = stage.rank[chosen]
    if not rank.size:
        return start
    seen: dict[int, int] = {}
    place = np.array([seen.update({r: seen.get(r, -1) + 1}) or seen[r] for r in rank.tolist()])
    begin = start + place * COPY_US
    kind = Kind.FLASH_GRADIENT if direction == Direction.BACKWARD else Kind.FLASH_COPY
    span(kind, Resource.COPY_ENGINE, begin, begin + COPY_US, rank=rank, peer=stage.origin[chosen],
         expert=stage.expert[chosen], bytes=EXPERT_BYTES)  # fmt: skip
    return float((begin + COPY_US).max())
