"""Plan a step: gather the counts of all ranks' sequences, make the plan, and choose the group of each micro-batch.

Symbols: S sequences of all ranks, T tokens, L layers, E experts, K experts per token, M micro-batches. Sequences are
numbered by rank, then in the rank's own order.

Planning itself communicates nothing: every rank makes the same plan from the same counts, in the background.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import MOST_SLOTS, check_whole
from equilibra.core.errors import BudgetError, InputError, PlanError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, check_mini_batches, static_imbalance, step_load
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import Stage, StepPlan
from equilibra.core.visit import signed_ids
from equilibra.cost.presets import AUTO, prices_of
from equilibra.cost.rates import Rates, rates_for
from equilibra.execute.group import ExpertGroup
from equilibra.execute.kernels.shares import launches_of
from equilibra.plan.pack import turn_in_mini_batch
from equilibra.plan.planner import PlannerSetting, StepProblem
from equilibra.plan.step import Equilibra, late_stages
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import RoutingTrace

STATIC = "static"
"""the planner that switches balancing off"""


# --- counts ---


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCounts:
    """Lengths and loads of all ranks' sequences."""

    sequences: SequenceLoad
    """loads and lengths"""
    unrecorded_of_sequence: NDArray[np.int64]
    """[S] tokens whose routing is missing or cannot be replayed"""
    mini_batch_of_sequence: NDArray[np.int64]
    """[S] optimizer step of each sequence"""
    rank_of_sequence: NDArray[np.int64]
    """[S] world rank that owns each sequence"""


def recorded_experts(routing: RoutingTrace) -> NDArray[np.signedinteger]:
    """[T, L, K] experts to replay; -1 for tokens without recorded routing, or with an expert twice (filler rows)."""
    experts = routing.ids.astype(signed_ids(routing.num_experts))
    ordered = np.sort(experts, axis=2)
    live = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
    if routing.recorded is not None:
        live |= ~routing.recorded
    experts[live] = -1
    return experts


def check_routing(
    routing: RoutingTrace | None, mini_batches: NDArray[np.integer], *, num_layers: int, num_experts: int, top_k: int
) -> None:
    """Raise InputError if the routing does not fit the model, or not every sequence has a mini-batch."""
    num_sequences = 0 if routing is None else routing.length_of_sequence.size
    check_mini_batches(mini_batches, num_sequences, complete=False)
    if routing is not None:
        found, required = (*routing.shape[1:], routing.num_experts), (num_layers, top_k, num_experts)
        if found != required:
            raise InputError(
                f"the routing is of another model: it has {found[0]} layers with {found[1]} of {found[2]} experts per "
                f"token, the model {required[0]} with {required[1]} of {required[2]}"
            )


def gather_counts(
    group: ExpertGroup, routing: RoutingTrace | None, experts_TLK: NDArray[np.signedinteger],
    mini_batches: NDArray[np.integer], *, num_layers: int, num_experts: int,
) -> StepCounts:  # fmt: skip
    """Collective: counts of all ranks' sequences. A rank without sequences passes None as routing."""
    mine = np.zeros((0, 3), np.int64)
    loads = np.zeros((0, num_layers, num_experts), np.int32)
    if routing is not None:
        live_T = experts_TLK[:, 0, 0] < 0
        loads = sequence_loads(replace(routing, recorded=~live_T if live_T.any() else None)).tokens_SLE
        unrecorded = np.add.reduceat(live_T.astype(np.int64), routing.offsets[:-1])
        mine = np.stack([routing.length_of_sequence, unrecorded, mini_batches.astype(np.int64)], axis=1)
    every = group.gather(mine, what="gathering lengths of sequences")
    lengths, unrecorded_of_sequence, mini_batch_of_sequence = np.concatenate(every).astype(np.int64).T.copy()
    if lengths.size == 0:
        raise InputError("cannot plan a step: no rank has a sequence")
    check_mini_batches(mini_batch_of_sequence, lengths.size)
    narrow = np.uint16 if lengths.max() < 2**16 else np.int32
    gathered = group.gather(loads.astype(narrow), what="gathering counts of routing")
    return StepCounts(
        sequences=SequenceLoad(tokens_SLE=np.concatenate(gathered).astype(np.int32), length_of_sequence=lengths),
        unrecorded_of_sequence=unrecorded_of_sequence,
        mini_batch_of_sequence=mini_batch_of_sequence,
        rank_of_sequence=np.repeat(np.arange(len(every)), [len(part) for part in every]),
    )


# --- the plan ---


@dataclass(frozen=True, kw_only=True)
class BalancerSetting(PlannerSetting):
    """How steps are planned; equal on every rank."""

    tokens_per_rank: int
    """token budget of a rank's part of a micro-batch"""
    spare_slots: int = MOST_SLOTS
    """flash copies a plan may give a rank; capped by `CopySetting.spare_slots`"""
    move_sequences: bool = True
    """whether sequences may run on ranks other than their owners, which sends their data there"""
    migration_bytes: int = 256 << 20
    """staging memory per rank for moving homes"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("tokens_per_rank", self.tokens_per_rank, low=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A plan, with the loads and groups that the runtime needs to execute it."""

    plan: StepPlan
    """always with a schedule"""
    group_of_micro_batch: NDArray[np.int64]
    """[M] expert-parallel group that runs each"""
    static_imbalance: float
    """slowest over mean rank with contiguous homes, no copies and every sequence on its owner"""
    load: StepLoad
    """loads under the plan's schedule"""
    late: frozenset[Stage]
    """stages whose flash copies would arrive late over one link"""
    began: float
    """start of planning, seconds of perf_counter"""
    ended: float
    """end of planning"""


def plan_of_counts(
    counts: StepCounts, previous: Placement, group: ExpertGroup, setting: BalancerSetting, rates: Rates
) -> PlannedStep:
    """The plan of a step; equal on every rank."""
    began = perf_counter()
    own = own_schedule(
        counts.sequences.length_of_sequence, counts.rank_of_sequence, counts.mini_batch_of_sequence,
        num_ranks=group.num_ranks, tokens_per_rank=setting.tokens_per_rank,
    )  # fmt: skip
    planner = setting.chosen_planner
    off = planner.name == STATIC
    layers, experts = counts.sequences.num_layers, counts.sequences.num_experts
    plain = contiguous(group.cluster, num_layers=layers, num_experts=experts)
    problem = StepProblem(
        cluster=group.cluster, sequences=counts.sequences, schedule=own.schedule,
        mini_batch_of_sequence=counts.mini_batch_of_sequence,
        tokens_per_rank=setting.tokens_per_rank if setting.move_sequences else None,
        least_micro_batches=group.num_groups, previous=plain if off else previous, rates=rates, **setting.limits(),
    )  # fmt: skip
    plan = planner.plan(problem)
    if off:
        plan = replace(plan, previous=previous)  # homes that have moved go back
    schedule = plan.schedule or own.schedule
    _check_mini_batches(planner.name, schedule, counts.mini_batch_of_sequence)
    plan, load = replace(plan, schedule=schedule), problem.load_under(schedule)
    return PlannedStep(
        plan=plan,
        group_of_micro_batch=_groups(schedule, own, group.num_groups),
        static_imbalance=static_imbalance(problem.load),
        load=load,
        late=late_stages(plan, load, rates),
        began=began,
        ended=perf_counter(),
    )


def _check_mini_batches(planner: str, schedule: Schedule, mini_batch_of_sequence: NDArray[np.int64]) -> None:
    if not np.array_equal(schedule.mini_batch_of_sequence, mini_batch_of_sequence):
        raise PlanError(
            f"planner {planner} moved sequences to other mini-batches: it must pack each mini-batch by itself "
            "(equilibra.plan.pack.joined), or keep the given schedule"
        )


def _groups(schedule: Schedule, own: OwnSchedule, num_groups: int) -> NDArray[np.int64]:
    """[M] group that runs each: the given schedule's if the planner kept it, else in turns within each mini-batch."""
    kept = own.schedule
    if np.array_equal(schedule.micro_batch_of_sequence, kept.micro_batch_of_sequence) and np.array_equal(
        schedule.rank_of_sequence, kept.rank_of_sequence
    ):
        return own.group_of_micro_batch
    return turn_in_mini_batch(schedule) % num_groups


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnSchedule:
    """A schedule that leaves every sequence on its owner, and the group that runs each micro-batch."""

    schedule: Schedule
    """ranks within the expert-parallel group"""
    group_of_micro_batch: NDArray[np.int64]
    """[M]"""


def own_schedule(
    lengths: NDArray[np.int64], rank_of_sequence: NDArray[np.int64], mini_batch_of_sequence: NDArray[np.integer], *,
    num_ranks: int, tokens_per_rank: int,
) -> OwnSchedule:  # fmt: skip
    """Pack each world rank's sequences of a mini-batch in order; a group makes as many as its fullest rank needs."""
    if lengths.max() > tokens_per_rank:
        raise BudgetError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, tokens_per_rank is {tokens_per_rank}: "
            f"allow at least {lengths.max()}"
        )
    turn_of_sequence = np.zeros(lengths.size, np.int64)
    turn_of: Counter[tuple[int, int]] = Counter()
    used_of: Counter[tuple[int, int]] = Counter()
    cells = zip(rank_of_sequence.tolist(), mini_batch_of_sequence.tolist(), strict=True)
    for s, (length, cell) in enumerate(zip(lengths.tolist(), cells, strict=True)):
        if used_of[cell] + length > tokens_per_rank:
            turn_of[cell], used_of[cell] = turn_of[cell] + 1, 0
        turn_of_sequence[s] = turn_of[cell]
        used_of[cell] += length
    keys = np.stack([mini_batch_of_sequence, turn_of_sequence, rank_of_sequence // num_ranks])
    keys_of_micro_batch, number = np.unique(keys, axis=1, return_inverse=True)  # by mini-batch, turn, group: no gaps
    return OwnSchedule(
        schedule=Schedule(
            micro_batch_of_sequence=number.ravel().astype(np.int32),
            rank_of_sequence=(rank_of_sequence % num_ranks).astype(np.int32),
            num_micro_batches=keys_of_micro_batch.shape[1],
            mini_batch_of_micro_batch=keys_of_micro_batch[0].astype(np.int32),
        ),
        group_of_micro_batch=keys_of_micro_batch[2],
    )


# --- warm-up ---

SEQUENCES, TOKENS, LAYERS, EXPERTS, TOP_K = 32, 12, 2, 8, 2
"""of a made-up step"""


def warm(num_nodes: int) -> None:
    """Compile the code of a step once, in the process that ranks are forked from, by planning a made-up step.

    More than two nodes use the code of two. Leaves no thread behind, so the process may fork.
    """
    random = np.random.default_rng(0)
    popular = random.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (SEQUENCES * TOKENS * LAYERS, 1)), axis=1)
    ids = np.where(popular[:, :TOP_K] > 3, popular[:, :TOP_K] - 3, popular[:, :TOP_K])
    ids[:, 1] = (ids[:, 0] + 1) % EXPERTS
    trace = RoutingTrace(
        ids=ids.reshape(-1, LAYERS, TOP_K), offsets=np.arange(SEQUENCES + 1, dtype=np.int64) * TOKENS,
        num_experts=EXPERTS,
    )  # fmt: skip
    nodes = min(num_nodes, 2)
    cluster = Cluster(num_nodes=nodes, ranks_per_node=4 // nodes)
    loads = sequence_loads(trace)
    mini_batches = np.arange(SEQUENCES) % 2
    owner = np.repeat(np.arange(4), SEQUENCES // 4)
    own = own_schedule(loads.length_of_sequence, owner, mini_batches, num_ranks=4, tokens_per_rank=4 * TOKENS)
    problem = StepProblem(
        cluster=cluster, sequences=loads, schedule=own.schedule, tokens_per_rank=4 * TOKENS,
        mini_batch_of_sequence=mini_batches, spare_slots=2, standing_slots=2, rates=Rates.free(),
        previous=contiguous(cluster, num_layers=LAYERS, num_experts=EXPERTS),
    )  # fmt: skip
    plan = Equilibra(threads=1).plan(problem)
    assert plan.schedule is not None
    load = step_load(loads, plan.schedule, cluster)
    _warm_scarce(cluster)
    visit = plan.visit(Stage.UPDATE, 0, 0)
    visit.send_table(recorded_experts(trace)[:TOKENS, 0], 0)
    visit.receive_table(0, visit.counts(load, 0))
    launches_of(np.array([40, 9]), np.array([4, 6]), 20, 32, 200, 100, 60, 3)


def _warm_scarce(cluster: Cluster) -> None:
    """Plan a step whose copy slots do not suffice, at the prices of real links: both choose other code."""
    num_experts = 8 * cluster.num_ranks
    tokens_MLER = np.zeros((1, 1, num_experts, cluster.num_ranks), np.int32)
    tokens_MLER[:, :, :8] = np.arange(20, 28)[:, None]  # all on the first rank: another can take one of eight
    model = MoEModel(
        name="made up", num_layers=1, hidden=64, expert_ffn=32, num_experts=num_experts, top_k=TOP_K, weight_bytes=2
    )
    rates = rates_for(model, prices_of(AUTO), num_nodes=cluster.num_nodes)
    problem = StepProblem(
        cluster=cluster, given_load=StepLoad(tokens_MLER=tokens_MLER), rates=rates, spare_slots=1,
        previous=contiguous(cluster, num_layers=1, num_experts=num_experts), max_moves_per_layer=0,
    )  # fmt: skip
    Equilibra(threads=1).plan(problem)


def cache_folder() -> Path | None:
    """Where numba keeps the compiled code; None if it keeps none."""
    found: Any = getattr(launches_of, "stats", None)  # absent under NUMBA_DISABLE_JIT
    return Path(found.cache_path) if found is not None and found.cache_path else None
