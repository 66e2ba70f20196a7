"""The pipeline's closed form against its timeline, the search against brute force, and what the answer says."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references import deployments
from tests.references.machines import round_hardware

from equilibra.core.errors import BudgetError, InputError
from equilibra.core.model import MoEModel, model_named
from equilibra.cost.decode import Context, lognormal_context
from equilibra.cost.presets import prices_named
from equilibra.plan.deployment import search
from equilibra.plan.deployment.answer import answer
from equilibra.plan.deployment.question import Question, Side
from equilibra.plan.deployment.times import Server, colocated_times, conditions, iteration_us, timeline

TIMES = st.floats(0.1, 100)


def length_of(t_a, t_e, t_c, layers, m):
    return max(busy.end_us for busy in timeline(t_a, t_e, t_c, layers=layers, micro_batches=m))


@given(t_a=TIMES, t_e=TIMES, t_c=st.floats(0, 150), layers=st.integers(1, 9), m=st.integers(1, 6))
def test_the_closed_form_is_the_timeline(t_a, t_e, t_c, layers, m):
    said = float(iteration_us(t_a, t_e, t_c, layers=layers, micro_batches=m))
    assert said == pytest.approx(length_of(t_a, t_e, t_c, layers, m), rel=1e-12)


@given(t_f=TIMES, share=st.floats(0, 0.999), layers=st.integers(1, 9), m=st.integers(3, 6))
def test_where_the_papers_conditions_hold_its_formula_is_exact(t_f, share, layers, m):
    t_c = share * t_f
    held = conditions(t_f, t_f, t_c, m)
    assert held.balanced
    assert held.transfer_hidden
    assert held.enough_micro_batches == (m * t_f >= 2 * (t_f + t_c))
    if held.all_hold:
        paper = (t_f + t_f + 2 * t_c) + t_f * (m * layers - 1)
        assert length_of(t_f, t_f, t_c, layers, m) == pytest.approx(paper, rel=1e-12)


def test_three_micro_batches_hide_short_transfers_and_four_longer_ones():
    assert conditions(10, 10, 4.9, 3).all_hold
    assert not conditions(10, 10, 5.1, 3).enough_micro_batches
    assert conditions(10, 10, 9.9, 4).all_hold
    assert not conditions(10, 10, 10.1, 4).transfer_hidden
    assert not conditions(10, 8, 1, 3).balanced


def test_a_timeline_by_hand():
    busy = timeline(10, 6, 1, layers=2, micro_batches=2)
    mine = [one[1:] for one in busy if one.server is Server.ATTENTION]
    assert mine == [(0, 0, 0, 10), (0, 1, 10, 20), (1, 0, 20, 30), (1, 1, 30, 40)]  # 0 is back at 18, before 20
    theirs = [one[1:] for one in busy if one.server is Server.EXPERTS]
    assert theirs == [(0, 0, 11, 17), (0, 1, 21, 27), (1, 0, 31, 37), (1, 1, 41, 47)]
    assert busy[-1].end_us == 48


MODEL = MoEModel(
    name="m", num_layers=3, hidden=64, expert_ffn=48, num_experts=6, top_k=2, num_heads=4, cache_heads=2,
    cache_values=64, score_width=64, outer_parameters=30_000,
)  # fmt: skip


@st.composite
def questions(draw):
    """Small ones: memory for a handful of sequences, rates such that any part can be the slowest."""
    model = replace(
        MODEL, num_experts=draw(st.sampled_from([2, 4, 6])), num_layers=draw(st.integers(1, 4)),
        quadratic_share=draw(st.sampled_from([1.0, 0.5])), window=8, cache_heads=draw(st.sampled_from([1, 2])),
        num_dense_layers=draw(st.integers(0, 1)),
    )  # fmt: skip
    experts_bytes = model.num_layers * model.num_experts * model.expert_bytes
    sides = []
    for _ in range(2):
        room = draw(st.floats(0.3, 2)) * experts_bytes + 200_000
        prices = round_hardware(
            memory_bytes=int(room), ranks_per_node=draw(st.sampled_from([1, 2, 4])), nvlink_gb_per_s=450.0,
            nic_gb_per_s=draw(st.sampled_from([0.1, 1.0, 50.0])), dense_tflops=draw(st.floats(0.05, 1000)),
            hbm_gb_per_s=draw(st.floats(0.5, 4000)),
        )  # fmt: skip
        sides.append(Side.of(prices, cost_per_hour=draw(st.floats(0.5, 5))))
    same = draw(st.booleans())
    longest = draw(st.floats(10, 200))
    context = Context(mean=longest / 2, deviation=draw(st.floats(0, 0.3)) * longest, longest=longest)
    return Question(
        model=model, attention=sides[0], experts=sides[0] if same else sides[1], context=context,
        latency_us=draw(st.floats(100, 5000)), max_ranks=draw(st.integers(2, 9)),
        max_micro_batches=draw(st.integers(1, 4)), imbalance=draw(st.sampled_from([1.0, 1.4])),
        objective=draw(st.sampled_from(["gpu", "cost"])),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(question=questions())
def test_the_search_finds_what_brute_force_finds(question):
    slow = deployments.best(question, most_batch=60)
    if slow is None:
        with pytest.raises(InputError):
            search.best_disaggregated(question)
        return
    plan = search.best_disaggregated(question)
    value = plan.value(question.objective)
    if plan.batch <= 60:
        assert value == pytest.approx(slow[0], rel=1e-9)
    else:
        assert value >= slow[0] * (1 - 1e-9)
    layout = (plan.attention_nodes, plan.attention_tensor, plan.expert_nodes, plan.expert_tensor, plan.micro_batches)
    again = deployments.value_of(question, layout, plan.batch)  # allowed, and worth what it says
    assert again == pytest.approx(value, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(question=questions())
def test_the_colocated_search_finds_the_best_of_every_batch(question):
    question = replace(question, experts=question.attention)
    layouts = search.colocated_layouts(question)
    best = 0.0
    for batch in range(1, 61):
        found = colocated_times(question, layouts, np.full(layouts.micro_batches.size, float(batch)))
        good = found.fits & (found.latency <= question.latency_us)
        per = layouts.expert_ranks * (1 if question.objective == "gpu" else question.attention.cost_per_hour / 3600)
        value = batch * layouts.micro_batches * layouts.attention_nodes * 1e6 / found.latency / per
        best = max(best, float(value[good].max(initial=0.0)))
    if not best:
        with pytest.raises(InputError):
            search.best_colocated(question)
        return
    plan = search.best_colocated(question)
    assert plan.value(question.objective) >= best * (1 - 1e-9)
    assert plan.batch > 60 or plan.value(question.objective) == pytest.approx(best, rel=1e-9)


def side(name, **changes):
    return Side.of(replace(prices_named(name), **changes))


def asked(model="mixtral-8x22b", attention="h200", experts=None, **changes):
    values = {"context": Context(mean=4096), "latency_us": 100e3} | changes
    return Question(model=model_named(model), attention=side(attention), experts=side(experts or attention), **values)


def test_thinned_numbers_of_nodes_cost_little():
    question = asked("qwen3-30b-a3b", max_ranks=400, context=Context(mean=200), latency_us=20e3)
    plan = search.best_disaggregated(question)
    every = search.EVERY_NODE
    try:
        search.EVERY_NODE = 16
        thinned = search.best_disaggregated(question)
    finally:
        search.EVERY_NODE = every
    assert thinned.tokens_per_s_and_rank >= 0.98 * plan.tokens_per_s_and_rank


def test_an_answer_holds_together():
    found = answer(asked("mixtral-8x22b", "h20", "l40s", objective="cost", context=Context(mean=730)))
    said = found.to_json()
    ours, best = found.disaggregated, found.colocated[0]
    assert said["ratio"]["cost"] == pytest.approx(ours.tokens_per_cost / best.tokens_per_cost)
    assert said["ratio"]["gpu"] == pytest.approx(
        ours.tokens_per_s_and_rank / max(plan.tokens_per_s_and_rank for plan in found.colocated)
    )
    assert ours.latency_us <= 100e3
    assert ours.tokens_per_s == pytest.approx(ours.sequences / ours.latency_us * 1e6)
    assert ours.ranks == ours.attention_nodes * ours.attention_tensor + ours.expert_nodes * ours.expert_tensor
    assert {plan.hardware for plan in found.colocated} == {("h20", "h20"), ("l40s", "l40s")}
    assert max(ours.memory_bytes) <= 0.9 * 96e9
    assert said["bound"]["batch"] in ("memory", "latency", "latency and memory")
    assert found.search_s < 1


def test_a_dead_zone_is_named_with_its_size_and_cure():
    question = asked("deepseek-v3", context=Context(mean=4096), latency_us=50e3)
    found = answer(question)
    assert found.verdict == "dead zone"
    assert found.ratio["gpu"] < 0.98
    assert f"{1 / found.ratio['gpu']:.2f}x" in found.sentence
    slow = replace(question.attention, prices=replace(question.attention.prices, nic_gb_per_s=5.0))
    slower = answer(replace(question, attention=slow, experts=slow))
    assert slower.ratio["gpu"] > 0
    assert (found.links is None) == ("No network" in found.sentence)


def test_links_that_would_win_are_found():
    """Cheap experts behind a slow wire: a faster one pays."""
    question = asked("scaled-moe-317b", "h20", "l40s", objective="cost", context=Context(mean=730), latency_us=150e3)
    slow = {
        name: replace(getattr(question, name), prices=replace(getattr(question, name).prices, nic_gb_per_s=1.0))
        for name in ("attention", "experts")
    }
    found = answer(replace(question, **slow))
    assert found.verdict == "dead zone"
    assert found.links not in (None, inf)
    assert f"{found.links:g} times as fast" in found.sentence


def test_a_group_of_one_node_sends_nothing():
    def layout_of(nodes):
        one, some = np.float64(1), np.float64(nodes)
        return search.Layout(
            attention_nodes=some, attention_tensor=one, expert_nodes=some, expert_tensor=one, micro_batches=one
        )

    question = asked("qwen3-30b-a3b")
    alone = colocated_times(question, layout_of(1), 4.0)
    assert float(alone.t_c) == 0.0
    layers = question.model.num_layers
    assert float(alone.latency) == pytest.approx(float(alone.outer + layers * (alone.t_a + alone.t_e)), rel=1e-12)
    apart = colocated_times(question, layout_of(2), 4.0)
    assert float(apart.t_c) > 0


def test_what_stops_a_batch_from_growing_is_named():
    question = asked("qwen3-30b-a3b", max_ranks=16)
    plan = search.best_disaggregated(question)
    patient, full = replace(question, latency_us=1e9), replace(plan, batch=10**5)
    assert search.grown(patient, replace(plan, batch=1)) == "nothing"
    assert search.grown(patient, full) == "memory"
    assert search.grown(replace(question, latency_us=1.0), replace(plan, batch=1)) == "latency"
    assert search.grown(replace(question, latency_us=1.0), full) == "latency and memory"
    assert search.grown(question, plan) != "nothing", "the best plan has the largest batch"


def test_the_slowest_part_sets_the_pace_where_micro_batches_fill_the_round_trip():
    found = answer(asked("mixtral-8x22b"))

    def pace(t_a, t_e, t_c, m):
        plan = replace(found.disaggregated, t_a_us=t_a, t_e_us=t_e, t_c_us=t_c, micro_batches=m)
        return replace(found, disaggregated=plan).bound["pace"]

    assert pace(10.0, 8.0, 5.0, 3) == "attention"
    assert pace(8.0, 10.0, 5.0, 3) == "experts"
    assert pace(8.0, 8.0, 30.0, 3) == "transfers"
    assert pace(10.0, 8.0, 7.0, 3) == "the round trip"
    assert pace(10.0, 8.0, 5.0, 2) == "the round trip"


def test_long_tails_cost_memory_and_time():
    even = Context(mean=2000)
    tail = lognormal_context(prompt=0, median=1500, sigma=1.0, limit=32_768)
    tail = replace(tail, deviation=tail.deviation * 2000 / tail.mean, mean=2000.0)
    plans = [search.best_disaggregated(asked("qwen3-30b-a3b", context=context)) for context in (even, tail)]
    assert plans[1].tokens_per_s_and_rank < plans[0].tokens_per_s_and_rank


def test_more_latency_never_costs_throughput():
    rates = [
        search.best_disaggregated(asked("dbrx", "a800", latency_us=ms * 1e3)).tokens_per_s_and_rank
        for ms in (40, 60, 100, 200)
    ]
    assert rates == sorted(rates)


@pytest.mark.parametrize(("changes", "message"), [
    ({"latency_us": 1e3}, "latency 1 ms is out of reach of disaggregated mixtral-8x22b: the fastest deployment .* ms"),
    ({"max_ranks": 1}, "a disaggregated deployment has a rank for each side: allow 2 or more, not 1"),
    ({"max_ranks": 2}, "does not fit disaggregated on 2 ranks of h200 and h200: experts take 271 GB"),
    ({"context": Context(mean=1e8)}, "the cache of one sequence of 100000000 tokens"),
])  # fmt: skip
def test_what_cannot_be_says_why(changes, message):
    with pytest.raises((InputError, BudgetError), match=message):
        answer(asked(**changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"latency_us": 0.0}, "latency must be"), ({"max_ranks": 0}, "ranks must be"), ({"imbalance": 0.5}, "imbalance"),
    ({"objective": "cost"}, "hardware h200 has no known cost per hour"), ({"objective": "speed"}, "objective must be"),
    ({"model": "qwen3-next"}, "linear"), ({"max_micro_batches": 0}, "micro-batches must be"),
])  # fmt: skip
def test_questions_are_checked(changes, message):
    with pytest.raises(InputError, match=message):
        asked(**changes)


def test_where_nothing_colocated_serves_disaggregation_stands_alone():
    found = answer(asked("mixtral-8x22b"))
    alone = replace(found, colocated=())
    assert (alone.verdict, alone.ratio) == ("alone", {})
    assert "no colocated deployment serves" in alone.sentence
    assert alone.to_json()["colocated"] == []
    small = side("l40s", memory_bytes=16 * 10**9)  # experts too large for nine ranks, in groups too
    with pytest.raises(BudgetError, match="does not fit colocated"):
        search.best_colocated(replace(asked("mixtral-8x22b", max_ranks=9), attention=small, experts=small))
