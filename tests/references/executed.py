"""Random steps, planned by the real planners and executed on whole numbers through the real tables.

Symbols: M micro-batches, L layers, R ranks, E experts, T tokens of a rank in a micro-batch, K experts per token.

Every token has a random value of 64 bits, every expert a function of it. A visit (one layer of one micro-batch in one
stage) sends rows, groups them, computes them by instance and sends them back, with `send_table`, `counts` and
`receive_table` of every rank. Sums of 64 bits wrap, so they have no rounding: every token must get exactly the sum over
its own choices. A pair that is lost, doubled, computed by another expert or returned to another token changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import Stage, StepPlan
from equilibra.core.visit import ReceiveTable, SendTable, Visit
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates, rates_for
from equilibra.integrations.planned import HomeSlots, SlotCounts, slot_table
from equilibra.plan.planner import StepProblem, planner_named, respects_nodes, respects_slots

ROUTINGS = (
    "balanced", "hot experts", "hot rank", "hot experts apart", "ragged sources", "empty experts and ranks", "rotating",
    "burst", "zipf", "one expert",
)  # fmt: skip
"""the first eight are the families W0 to W7 of Megatron's imbalance workloads"""
PLANNERS = ("static", "eplb-oracle", "lpt", "lplb", "ultraep", "llep")
"""beside ours, now and then"""
WORK = 256
"""ranks times visits of a step, about"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Routing of a step, and how it is to be planned."""

    problem: StepProblem
    planner: str
    routing: str
    experts: list[list[NDArray[np.int64]]]
    """by l * M + m and rank: [T, K]"""

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster


def random_step(rng: np.random.Generator) -> Step:
    """Any cluster of 1 to 8 nodes of 1 to 8 ranks, any routing, any limits."""
    cluster = Cluster(
        num_nodes=int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8], p=[0.4, 0.25, 0.1, 0.1, 0.04, 0.04, 0.03, 0.04])),
        ranks_per_node=int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8], p=[0.12, 0.25, 0.15, 0.2, 0.07, 0.07, 0.07, 0.07])),
    )
    num_ranks, num_layers = cluster.num_ranks, int(rng.integers(1, 4))
    num_experts = num_ranks * int(rng.integers(1, 1 + max(64 // num_ranks, 2)))
    num_experts = min(num_experts, 8 * num_ranks)
    top_k = int(rng.integers(1, min(num_experts, 8) + 1))
    num_micro_batches = max(WORK // num_ranks // num_layers, 2)
    routing = str(rng.choice(ROUTINGS))
    shape = (num_layers, num_micro_batches, num_ranks)
    logits_LME = _logits(rng, routing, cluster, shape, num_experts)
    tokens_LMR = _tokens(rng, routing, shape, most=int(rng.integers(1, 25)))
    experts, counts = [], np.zeros((num_micro_batches, num_layers, num_experts, num_ranks), np.int32)
    for layer in range(num_layers):
        for m in range(num_micro_batches):
            lengths = tokens_LMR[layer, m]
            noise = rng.gumbel(size=(lengths.sum(), num_experts)) + logits_LME[layer, m]
            ids = np.argsort(-noise, axis=1)[:, :top_k]
            source = np.repeat(np.arange(num_ranks), lengths * top_k)
            np.add.at(counts[m, layer], (ids.ravel(), source), 1)
            experts.append(np.split(ids, lengths.cumsum()[:-1]))
    homes = np.stack([rng.permutation(np.arange(num_experts) % num_ranks) for _ in range(num_layers)]).astype(np.int32)
    ours = rng.random() < 0.9
    problem = StepProblem(
        cluster=cluster, given_load=StepLoad(tokens_MLER=counts),
        previous=Placement(home_of_expert=homes, cluster=cluster) if rng.random() < 0.5 else None,
        spare_slots=int(rng.integers(0, 5)), standing_slots=int(rng.integers(0, 4)),
        max_moves_per_layer=int(rng.choice([-1, 0, 2])),
        rates=_rates(rng, cluster, num_layers, num_experts, top_k), seed=int(rng.integers(100)),
    )  # fmt: skip
    return Step(
        problem=problem, planner="equilibra" if ours else str(rng.choice(PLANNERS)), routing=routing, experts=experts
    )


def _rates(rng: np.random.Generator, cluster: Cluster, num_layers: int, num_experts: int, top_k: int) -> Rates:
    """Free, or of a model whose experts are small enough that few tokens are worth a copy."""
    if rng.random() < 0.5:
        return Rates.free()
    model = MoEModel(
        name="random", num_layers=num_layers, hidden=64, expert_ffn=int(rng.choice([1, 16, 64])),
        num_experts=num_experts, top_k=top_k, weight_bytes=2, gradient_bytes=4,
    )  # fmt: skip
    prices = prices_named("h200")
    if rng.integers(2):
        prices = prices.without_kernels()
    elif rng.integers(2):  # what no device has a price for yet
        prices = replace(prices, kernels=replace(prices.kernels, serve_us_per_mb=0.4, tile_rows=1))
    return rates_for(model, prices, num_nodes=cluster.num_nodes)


def _logits(
    rng: np.random.Generator, routing: str, cluster: Cluster, shape: tuple[int, int, int], num_experts: int
) -> NDArray[np.float64]:
    """[L, M, E] how much tokens like each expert."""
    (num_layers, num_micro_batches, num_ranks), per_rank = shape, num_experts // cluster.num_ranks
    logits = np.zeros((num_layers, num_micro_batches, num_experts))
    heat, num_hot = float(rng.uniform(1, 6)), int(rng.integers(1, max(num_experts // 4, 1) + 1))
    for layer in range(num_layers):
        hot = rng.permutation(num_experts)[:num_hot]
        if routing == "hot rank":
            hot = int(rng.integers(num_ranks)) * per_rank + np.arange(per_rank)
        elif routing == "hot experts apart":
            hot = (
                np.arange(int(rng.integers(num_experts)), num_experts * 2, max(num_experts // num_hot, 1)) % num_experts
            )
        for m in range(num_micro_batches):
            if routing in {"hot experts", "hot rank", "hot experts apart"} or (routing == "burst" and m % 4 == 0):
                logits[layer, m, hot] += heat
            elif routing == "rotating":
                logits[layer, m, (hot + m) % num_experts] += heat
            elif routing == "empty experts and ranks":  # the last ones chosen, if there are not enough others
                logits[layer, m, rng.permutation(num_experts)[: num_experts // 2]] -= 1e6
            elif routing == "zipf":
                logits[layer, m] = -rng.uniform(0.8, 2.0) * np.log(1 + rng.permutation(num_experts))
            elif routing == "one expert":
                logits[layer, m, hot[0]] += 1e6
    return logits


def _tokens(rng: np.random.Generator, routing: str, shape: tuple[int, int, int], *, most: int) -> NDArray[np.int64]:
    """[L, M, R] tokens of each rank: those of a micro-batch are the same in all layers."""
    _, num_micro_batches, num_ranks = shape
    tokens = np.full((num_micro_batches, num_ranks), most)
    if routing == "ragged sources":
        tokens = rng.integers(0, 2 * most + 1, tokens.shape)
    elif routing == "empty experts and ranks":
        tokens = tokens * (rng.random(tokens.shape) < 0.6)
    return np.broadcast_to(tokens, shape)


def planned(step: Step) -> StepPlan:
    """By the real planner, within its limits."""
    planner = planner_named(step.planner)
    plan = planner.plan(step.problem)
    keeps = respects_slots(planner) and respects_nodes(planner) and step.planner == "equilibra"
    plan.check(step.problem.load, spare_slots=step.problem.spare_slots if keeps else None)
    return plan


class LostPairError(AssertionError):
    """A pair is not computed exactly once by its expert, or does not come back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """The tables of a visit on all ranks."""

    visit: Visit
    sent: list[SendTable]
    received: list[ReceiveTable]


def tables_of(step: Step, plan: StepPlan, stage: Stage, layer: int, m: int) -> Routed:
    """As the runtime makes them."""
    load, ids = step.problem.load, step.experts[layer * plan.num_micro_batches + m]
    visit = plan.visit(stage, m, layer)
    ranks = range(step.cluster.num_ranks)
    return Routed(
        visit=visit,
        sent=[visit.send_table(ids[rank], rank) for rank in ranks],
        received=[visit.receive_table(rank, visit.counts(load, rank)) for rank in ranks],
    )


WRONG = (
    "", "a rank expects other rows than are sent to it", "a row is used twice or never",
    "a rank computes more or fewer rows than it receives", "a row is computed twice or never", "a token's sum is wrong",
)  # fmt: skip


def execute(ids: list[NDArray[np.int64]], routed: Routed, values: list[NDArray[np.uint64]]) -> int:
    """Rows there and back; every token's sum is compared. Returns the number of pairs."""
    sent, received = routed.sent, routed.received
    num_instances = [table.size_of_instance.size for table in received]
    wrong = _execute(
        np.concatenate(ids), np.array([0, *(len(of_rank) for of_rank in ids)]).cumsum(), np.concatenate(values),
        np.concatenate([table.token_of_row for table in sent]), np.concatenate([table.row_of_pair for table in sent]),
        np.stack([table.counts_RE.sum(axis=1) for table in sent]),
        np.stack([table.size_of_source for table in received]), np.array([0, *num_instances]).cumsum(),
        np.concatenate([routed.visit.on_rank(rank) for rank in range(len(ids))]),
        np.concatenate([table.size_of_instance for table in received]),
        np.concatenate([table.received_of_grouped for table in received]),
        np.concatenate([table.grouped_of_received for table in received]),
    )  # fmt: skip
    if wrong:
        raise LostPairError(WRONG[wrong])
    return sum(of_rank.size for of_rank in ids)


@njit(cache=True)
def _value(token, expert):  # what an expert makes of a token: another odd factor and another constant for each
    number = np.uint64(expert)
    return token * ((number * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)) | np.uint64(1)) ^ number


@njit(cache=True)
def _execute(
    ids_TK, first_token, values, token_of_row, row_of_pair, sent_SR, expected_RS, first_instance, expert_of_instance,
    size_of_instance, received_of_grouped, grouped_of_received,
):  # fmt: skip
    """All ranks, one after another. Arrays of ranks lie behind each other; returns the number of what is wrong."""
    num_ranks, num_pairs, top_k = len(sent_SR), ids_TK.size, ids_TK.shape[1]
    if token_of_row.size != num_pairs or received_of_grouped.size != num_pairs or grouped_of_received.size != num_pairs:
        return 4
    next_of_source = first_token[:-1] * top_k  # rows of a source are in the order of the ranks that they go to
    back, times = np.zeros(num_pairs, np.uint64), np.zeros(num_pairs, np.int64)
    first_row = 0
    for r in range(num_ranks):
        num_rows = 0
        for s in range(num_ranks):
            if sent_SR[s, r] != expected_RS[r, s]:
                return 1
            num_rows += sent_SR[s, r]
        rows, place = np.empty(num_rows, np.uint64), np.empty(num_rows, np.int64)
        at = 0
        for s in range(num_ranks):
            for _ in range(sent_SR[s, r]):
                place[at] = next_of_source[s]
                rows[at] = values[first_token[s] + token_of_row[place[at]]]
                next_of_source[s] += 1
                at += 1
        results, at = np.empty(num_rows, np.uint64), 0
        for i in range(first_instance[r], first_instance[r + 1]):
            if at + size_of_instance[i] > num_rows:
                return 3
            for _ in range(size_of_instance[i]):
                results[at] = _value(rows[received_of_grouped[first_row + at]], expert_of_instance[i])
                times[place[received_of_grouped[first_row + at]]] += 1
                at += 1
        if at != num_rows:
            return 3
        for n in range(num_rows):
            back[place[n]] = results[grouped_of_received[first_row + n]]
        first_row += num_rows
    if not (times == 1).all():
        return 4
    for s in range(num_ranks):
        first = first_token[s] * top_k
        for t in range(first_token[s], first_token[s + 1]):
            found = wanted = np.uint64(0)
            for k in range(top_k):
                row = first + row_of_pair[t, k]
                times[row] += 1
                found += back[row] * np.uint64(k + 1)
                wanted += _value(values[t], ids_TK[t, k]) * np.uint64(k + 1)
            if found != wanted:
                return 5
    return 0 if (times == 2).all() else 2


def check_slots(step: Step, plan: StepPlan, layer: int, m: int) -> None:
    """Frameworks number slots: every pair of a rank belongs to exactly one slot, and that is of its expert."""
    home, num_ranks = plan.placement.home_of_expert[layer], step.cluster.num_ranks
    expert_RH = np.argsort(home, kind="stable").reshape(num_ranks, -1).astype(np.int32)
    assert np.array_equal(
        HomeSlots(expert_of_slot=expert_RH[None], cluster=step.cluster).placement.home_of_expert[0], home
    )
    visit = plan.visit(Stage.UPDATE, m, layer)
    counts = SlotCounts(
        standing=int(np.bincount(visit.standing_rank, minlength=num_ranks).max(initial=0)),
        flash=int(np.bincount(visit.flash_rank, minlength=num_ranks).max(initial=0)),
    )
    for rank, ids in enumerate(step.experts[layer * plan.num_micro_batches + m]):
        slots = slot_table(visit, expert_RH, counts, rank, range(num_ranks))
        expert = ids.ravel()
        order = np.argsort(expert, kind="stable")
        ordinal = np.empty(expert.size, np.int64)
        first = np.searchsorted(expert[order], expert[order])
        ordinal[order] = np.arange(expert.size) - first
        takes = (
            (slots.expert_of_slot[:, None] == expert)
            & (slots.first_of_slot[:, None] <= ordinal)
            & (ordinal < slots.end_of_slot[:, None])
        )
        if not (takes.sum(axis=0) == 1).all():
            raise LostPairError(f"rank {rank}: a pair has no slot, or two")


@dataclass
class Tally:
    """What was executed."""

    steps: int = 0
    visits: int = 0
    pairs: int = 0
    copies: int = 0
    standing: int = 0
    moves: int = 0


def run_step(rng: np.random.Generator, tally: Tally) -> Step:
    """Plan one and execute every visit of it: both stages where they differ."""
    step = random_step(rng)
    plan = planned(step)
    same = plan.stages[Stage.UPDATE] is plan.stages[Stage.LOGPROB]
    for layer in range(plan.num_layers):
        for m in range(plan.num_micro_batches):
            ids = step.experts[layer * plan.num_micro_batches + m]
            values = [rng.integers(0, 2**64, len(of_rank), np.uint64) for of_rank in ids]
            for stage in (Stage.UPDATE,) if same else Stage:
                tally.pairs += execute(ids, tables_of(step, plan, stage, layer, m), values)
                tally.visits += 1
    even = step.planner in {"equilibra", "static"} and plan.placement.is_even()
    if even:
        check_slots(step, plan, 0, 0)
    tally.steps += 1
    tally.copies += sum(plan.stages[stage].num_copies for stage in ((Stage.UPDATE,) if same else Stage))
    tally.standing += plan.standing.num_copies
    tally.moves += plan.migration.num_moves
    return step
