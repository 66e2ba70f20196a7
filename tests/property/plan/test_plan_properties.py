"""Invariants 1 (once), 3 (same plan), 5 (not worse) and 6 (memory) over clusters, loads, slots and switches."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.one_layer import OneLayer, balance
from equilibra.plan.pack import in_order
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from references.step_cost import rank_rows, step_cost_us

SLOW = replace(prices_named("h200"), nvlink_gb_per_s=20.0, nic_gb_per_s=2.0)
RATES = {
    "free": Rates.free(),
    "H200": rates_for(model_named("qwen3-30b-a3b")),
    "slow links": rates_for(model_named("gpt-oss-20b"), SLOW),
    "with prices": replace(
        rates_for(model_named("qwen3-30b-a3b"), num_nodes=2),
        hold_us={Stage.LOGPROB: 0.3, Stage.UPDATE: 2.0},
        serve_us={Stage.LOGPROB: 0.0, Stage.UPDATE: 1.0},
    ),
}
KINDS = ["zero", "one-hot", "flat", "skewed", "correlated", "small", "huge", "mixed"]
many = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def tokens_of_kind(kind: str, rng: np.random.Generator, shape: tuple[int, int, int, int]) -> np.ndarray:
    """[M, L, E, R] tokens."""
    num_experts, num_ranks = shape[2:]
    tokens = np.zeros(shape, np.int64)
    if kind == "one-hot":
        tokens[:, :, int(rng.integers(num_experts))] = rng.integers(0, 500)
    elif kind == "flat":
        tokens[:] = rng.integers(0, 100)
    elif kind == "skewed":
        tokens[:] = rng.poisson(rng.gamma(0.3, 100, (1, *shape[1:3], 1)) * np.ones(shape))
    elif kind == "correlated":  # every micro-batch has other hot experts, and every source too
        tokens[:] = rng.poisson(rng.gamma(0.4, 60, shape))
    elif kind == "small":
        tokens[:] = rng.integers(0, 2, shape)
    elif kind == "huge":
        tokens[:] = rng.integers(0, (2**31 - 1) // num_ranks, shape)
    elif kind == "mixed":  # idle micro-batches, layers and experts beside one that has nearly all
        tokens[:] = rng.integers(0, 20, shape)
        tokens[:, :, 0] = rng.integers(0, 5000)
        tokens[0], tokens[:, -1] = tokens[0] * rng.integers(0, 2), tokens[:, -1] * rng.integers(0, 2)
    return tokens


@dataclass(frozen=True)
class Case:
    """A step and how it is planned."""

    problem: StepProblem
    switches: dict[str, bool]

    def plan(self, threads: int = 1) -> StepPlan:
        return Equilibra(threads=threads, work=50_000, **self.switches).plan(self.problem)

    @property
    def spare_slots(self) -> int:
        return self.problem.spare_slots if self.switches["flash"] else 0

    @property
    def standing_slots(self) -> int:
        return self.problem.standing_slots if self.switches["standing"] else 0

    def static(self, plan: StepPlan, load: StepLoad) -> StepPlan:
        """Nothing done: homes as they were, no copies."""
        num_ranks = load.num_ranks
        nothing = StagePlan(
            first_of_problem=np.zeros(load.num_layers * load.num_micro_batches + 1, np.int64),
            expert=np.zeros(0, np.int32),
            rank=np.zeros(0, np.int32),
            origin=np.zeros(0, np.int32),
            tokens_FR=np.zeros((0, num_ranks), np.int32),
            standing_tokens_CMR=np.zeros((0, load.num_micro_batches, num_ranks), np.int32),
        )
        home = self.problem.home_now
        return StepPlan(
            planner="static",
            placement=home,
            previous=home,
            standing=StandingCopies.none(),
            stages=dict.fromkeys(Stage, nothing),
            bound_LM=plan.bound_LM,
        )


@st.composite
def cases(draw, kinds=tuple(KINDS)) -> Case:
    cluster = Cluster(num_nodes=draw(st.integers(1, 4)), ranks_per_node=draw(st.integers(1, 8)))
    num_ranks = cluster.num_ranks
    num_experts = num_ranks * draw(st.integers(1, 4))
    num_layers, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(kinds))
    tokens = tokens_of_kind(kind, rng, (num_micro_batches, num_layers, num_experts, num_ranks)).astype(np.int32)
    previous = None
    if draw(st.booleans()):
        homes = [rng.permutation(np.repeat(np.arange(num_ranks), num_experts // num_ranks)) for _ in range(num_layers)]
        previous = Placement(home_of_expert=np.stack(homes).astype(np.int32), cluster=cluster)
    common = {
        "cluster": cluster,
        "previous": previous,
        "spare_slots": draw(st.integers(0, 3)),
        "standing_slots": draw(st.integers(0, 3)),
        "rates": RATES[draw(st.sampled_from(sorted(RATES)))],
        "seed": draw(st.integers(0, 100)),
    }
    switches = {name: draw(st.booleans()) for name in ("reorder", "standing", "flash", "pack")}
    if switches["pack"] and kind not in {"huge", "zero"}:
        # sequences: one per (micro-batch, source), of any length that holds its tokens
        per_sequence = tokens.transpose(0, 3, 1, 2).reshape(-1, num_layers, num_experts)
        lengths = np.maximum(per_sequence.sum(axis=2).max(axis=1), 1).astype(np.int64)
        budget = int(lengths.max()) * draw(st.integers(1, 3))
        sequences = SequenceLoad(tokens_SLE=np.ascontiguousarray(per_sequence), length_of_sequence=lengths)
        schedule = in_order(lengths, cluster, tokens_per_rank=budget)
        problem = StepProblem(sequences=sequences, schedule=schedule, tokens_per_rank=budget, **common)
    else:
        problem = StepProblem(given_load=StepLoad(tokens_MLER=np.ascontiguousarray(tokens)), **common)
    return Case(problem=problem, switches=switches)


def served_once(plan: StepPlan, load: StepLoad, stage: Stage) -> None:
    """Pour every pair out of the load, copy by copy; what is left is the home's, and must not be negative."""
    left = load.tokens_MLER.astype(np.int64)
    part = plan.stages[stage]
    num_micro_batches = load.num_micro_batches
    for problem in range(load.num_layers * num_micro_batches):
        layer, m = divmod(problem, num_micro_batches)
        for f in range(part.first_of_problem[problem], part.first_of_problem[problem + 1]):
            assert part.tokens_FR[f].min() >= 0
            left[m, layer, part.expert[f]] -= part.tokens_FR[f]
    for c in range(plan.standing.num_copies):
        assert part.standing_tokens_CMR[c].min() >= 0
        left[:, plan.standing.layer[c], plan.standing.expert[c]] -= part.standing_tokens_CMR[c]
    assert left.min() >= 0
    copied = int(part.tokens_FR.sum(dtype=np.int64) + part.standing_tokens_CMR.sum(dtype=np.int64))
    assert int(left.sum()) + copied == int(load.tokens_MLER.sum(dtype=np.int64))


@many
@given(cases())
def test_every_pair_is_computed_exactly_once_within_the_memory_allowed(case):
    plan = case.plan()
    load = case.problem.load_under(plan.schedule)
    plan.check(load, spare_slots=case.spare_slots)
    group, num_ranks = plan.cluster.ranks_per_node, plan.cluster.num_ranks
    for stage in Stage:
        served_once(plan, load, stage)
        part = plan.stages[stage]
        assert part.first_of_problem[-1] == part.num_copies
        assert (part.rank // group == part.origin // group).all(), "flash copies stay in their node"
        used = np.bincount(part.problem_of_copy() * num_ranks + part.rank, minlength=1)
        assert used.max() <= case.spare_slots
        by_hand = rank_rows(plan, load, stage)
        loads = plan.rank_load(load, stage)
        for (layer, m), rows in by_hand.items():
            assert loads[layer, m].tolist() == rows
    standing = plan.standing
    home_node = plan.placement.home_of_expert[standing.layer, standing.expert] // group
    assert (home_node != standing.rank // group).all(), "standing copies are on another node than the home"
    per_node_and_layer = np.bincount(standing.layer * plan.cluster.num_nodes + standing.rank // group, minlength=1)
    assert per_node_and_layer.max() <= case.standing_slots
    order = list(zip(standing.layer, standing.expert, standing.rank, strict=True))
    assert order == sorted(order)
    held = np.bincount(standing.rank, minlength=num_ranks).reshape(-1, group)
    assert (held.max(axis=1) - held.min(axis=1)).max() <= 1, f"standing copies over ranks of a node: {held}"
    before, after = case.problem.home_now, plan.placement
    np.testing.assert_array_equal(before.num_homes(), after.num_homes(), "as many homes on every rank as before")
    if not case.switches["reorder"]:
        assert before == after


@pytest.mark.parametrize("first_seed", [0, 30, 60, 90])
def test_standing_copies_stay_even_where_some_layers_fall_back_to_nothing(first_seed):
    """Several layers, so that one that gives up its copies leaves a gap in the memory of its ranks."""
    copies = 0
    for seed in range(first_seed, first_seed + 30):
        rng = np.random.default_rng(seed)
        cluster = Cluster(num_nodes=int(rng.integers(2, 5)), ranks_per_node=int(rng.integers(2, 9)))
        num_ranks, num_layers = cluster.num_ranks, int(rng.integers(3, 9))
        num_experts = num_ranks * int(rng.integers(1, 4))
        popularity = rng.dirichlet(np.full(num_experts, 10 ** rng.uniform(-1, 1)), size=num_layers)
        per_source = [rng.multinomial(int(10 ** rng.uniform(1.5, 3.5)), p, size=(2, num_ranks)) for p in popularity]
        load = StepLoad(tokens_MLER=np.ascontiguousarray(np.stack(per_source).transpose(1, 0, 3, 2), np.int32))
        problem = StepProblem(
            cluster=cluster,
            given_load=load,
            rates=RATES[sorted(RATES)[seed % 3]],
            spare_slots=seed % 2,
            standing_slots=1 + seed % 3,
        )
        plan = Equilibra(threads=1, work=50_000).plan(problem)
        plan.check(load, spare_slots=problem.spare_slots)
        held = np.bincount(plan.standing.rank, minlength=num_ranks).reshape(cluster.num_nodes, -1)
        assert (held.max(axis=1) - held.min(axis=1)).max() <= 1, f"seed {seed}: {held.tolist()}"
        copies += plan.standing.num_copies
    assert copies > 50


@many
@given(cases())
def test_no_plan_is_worse_than_static_and_none_is_below_its_bound(case):
    plan = case.plan()
    load = case.problem.load_under(plan.schedule)
    cost = step_cost_us(plan, load, case.problem.rates)
    given_load = case.problem.load  # static keeps the schedule that was given
    static = step_cost_us(case.static(plan, given_load), given_load, case.problem.rates)
    assert cost <= static * (1 + 1e-9)
    for stage in Stage:
        assert (plan.rank_load(load, stage).max(axis=2) >= plan.bound_LM).all(), "below a proven bound"
        assert plan.gap(load, stage) >= 0
    if load.tokens_MLER.any():
        slowest = sum(max(rows) for rows in rank_rows(plan, load, Stage.UPDATE).values())
        assert plan.gap(load) == pytest.approx(slowest / plan.bound_LM.sum() - 1)


@some
@given(cases())
def test_the_same_problem_gives_the_same_plan_whatever_the_threads(case):
    digests = {case.plan(threads).digest for threads in (1, 2, 2)}
    assert len(digests) == 1


@some
@given(cases(), st.integers(0, 3))
def test_a_migration_budget_is_kept(case, max_moves):
    planner = Equilibra(threads=1, work=50_000, **case.switches)
    plan = planner.plan(replace(case.problem, max_moves_per_layer=max_moves))
    moved = np.count_nonzero(plan.placement.home_of_expert != plan.previous.home_of_expert, axis=1)
    assert moved.max() <= max_moves


@some
@given(cases(kinds=("skewed", "correlated", "mixed")))
def test_packing_never_needs_more_micro_batches_and_keeps_every_sequence(case):
    if case.problem.sequences is None:
        return
    plan = case.plan()
    assert plan.schedule is not None
    assert plan.schedule.num_sequences == case.problem.sequences.num_sequences
    assert plan.num_micro_batches <= case.problem.schedule.num_micro_batches
    load = case.problem.load_under(plan.schedule)
    assert load.tokens_MLER.sum() == case.problem.sequences.tokens_SLE.sum()
    lengths = case.problem.sequences.length_of_sequence
    cells = plan.schedule.micro_batch_of_sequence * plan.cluster.num_ranks + plan.schedule.rank_of_sequence
    assert np.bincount(cells, weights=lengths).max() <= case.problem.tokens_per_rank


@many
@given(cases(), st.sampled_from([0.0, 0.005, 0.2, 5.0]), st.sampled_from([0, 1, 17, 10**6]))
def test_balance_serves_every_token_once_and_makes_no_rank_slower_than_the_slowest(case, tolerance, minimum):
    load = case.problem.load
    cluster, slots = case.problem.cluster, case.problem.spare_slots
    home = case.problem.home_now.home_of_expert[0]
    tokens = load.tokens_MLER[0, 0]
    done = balance(
        tokens,
        cluster=cluster,
        home_of_expert=home,
        spare_slots=slots,
        tolerance=tolerance,
        min_tokens_per_copy=minimum,
    )
    left = tokens.astype(np.int64)
    rows = np.bincount(home, weights=tokens.sum(axis=1, dtype=np.int64), minlength=cluster.num_ranks).astype(np.int64)
    before = int(rows.max())
    seen = set()
    for f, (expert, rank) in enumerate(zip(done.expert_of_copy.tolist(), done.rank_of_copy.tolist(), strict=True)):
        assert (expert, rank) not in seen
        seen.add((expert, rank))
        assert rank != home[expert]
        assert rank // cluster.ranks_per_node == home[expert] // cluster.ranks_per_node
        served = done.tokens_FR[f].astype(np.int64)
        assert served.min() >= 0
        assert served.sum() >= max(minimum, 1), "a copy that serves too little"
        left[expert] -= served
        rows[home[expert]] -= served.sum()
        rows[rank] += served.sum()
    assert left.min() >= 0
    assert rows.tolist() == done.rank_load.tolist()
    assert rows.max() <= before
    assert np.bincount(done.rank_of_copy, minlength=1).max() <= slots


@many
@given(cases(kinds=("skewed", "correlated", "mixed", "small")))
def test_balance_splits_over_standing_copies_of_another_load(case):
    """Copies that a plan chose for the last micro-batch serve the first: each pair once, never worse than homes."""
    load, cluster, slots = case.problem.load, case.problem.cluster, case.problem.spare_slots
    planned = case.plan()
    of_layer = planned.standing.layer == 0
    expert, rank = planned.standing.expert[of_layer], planned.standing.rank[of_layer]
    home, tokens = planned.placement.home_of_expert[0], load.tokens_MLER[0, 0]
    options = {"cluster": cluster, "home_of_expert": home, "spare_slots": slots}
    mixed = np.random.default_rng(0).permutation(expert.size)
    done = balance(tokens, standing_expert=expert[mixed], standing_rank=rank[mixed], **options)
    left = tokens.astype(np.int64)
    rows = np.bincount(home, weights=tokens.sum(axis=1, dtype=np.int64), minlength=cluster.num_ranks).astype(np.int64)
    before, instances = int(rows.max()), set(enumerate(home.tolist())) | set(zip(expert, rank, strict=True))
    for e, r, origin in zip(done.expert_of_copy, done.rank_of_copy, done.origin_of_copy, strict=True):
        assert (e, origin) in instances
        assert (e, r) not in instances
        assert origin // cluster.ranks_per_node == r // cluster.ranks_per_node
    every = [*zip(done.expert_of_copy, done.rank_of_copy, done.tokens_FR, strict=True)]
    every += zip(expert[mixed], rank[mixed], done.standing_tokens_CR, strict=True)
    for e, r, served in every:
        assert served.min() >= 0
        left[e] -= served
        rows[home[e]] -= served.sum()
        rows[r] += served.sum()
    assert left.min() >= 0
    assert rows.tolist() == done.rank_load.tolist()
    assert rows.max() <= before
    assert np.bincount(done.rank_of_copy, minlength=1).max() <= slots
    in_order = balance(tokens, standing_expert=expert, standing_rank=rank, **options)
    np.testing.assert_array_equal(in_order.standing_tokens_CR[mixed], done.standing_tokens_CR)
    layer = OneLayer(len(tokens), standing_expert=expert, standing_rank=rank, **options)
    for m in (*range(load.num_micro_batches), 0):  # laid out once, used again and again
        other = load.tokens_MLER[m, 0]
        again, fresh = layer.balance(other), balance(other, standing_expert=expert, standing_rank=rank, **options)
        for name, value in vars(fresh).items():
            np.testing.assert_array_equal(getattr(again, name), value, name)


def test_standing_copies_level_nodes_as_the_plan_that_chose_them():
    """For the load they were chosen for, a single call is as even as the plan; without them, nodes stay uneven."""
    cluster = Cluster(num_nodes=4, ranks_per_node=2)
    weights = np.random.default_rng(1).dirichlet(np.full(32, 0.3), size=4)
    tokens = np.stack([np.random.default_rng(2).multinomial(4000, of_layer, size=8).T for of_layer in weights])
    load = StepLoad(tokens_MLER=np.ascontiguousarray(tokens[None], np.int32))
    problem = StepProblem(cluster=cluster, given_load=load, rates=Rates.free(), standing_slots=3, spare_slots=2)
    plan = Equilibra(threads=1, reorder=False).plan(problem)
    for layer in range(4):
        of_layer = plan.standing.layer == layer
        slowest = int(plan.rank_load(load)[layer, 0].max())
        copies = {"standing_expert": plan.standing.expert[of_layer], "standing_rank": plan.standing.rank[of_layer]}
        assert balance(tokens[layer], cluster=cluster, **copies).rank_load.max() <= 1.005 * slowest
        assert balance(tokens[layer], cluster=cluster).rank_load.max() > 1.05 * slowest


def test_contiguous_homes_are_assumed_where_none_are_given():
    tokens = np.random.default_rng(0).integers(0, 100, (16, 8))
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    home = contiguous(cluster, num_layers=1, num_experts=16).home_of_expert[0]
    given_homes, assumed = balance(tokens, cluster=cluster, home_of_expert=home), balance(tokens, cluster=cluster)
    np.testing.assert_array_equal(given_homes.tokens_FR, assumed.tokens_FR)
    np.testing.assert_array_equal(given_homes.rank_of_copy, assumed.rank_of_copy)
