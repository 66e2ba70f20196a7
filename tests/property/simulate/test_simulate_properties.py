"""What must hold for any step: the timeline is the reference's, nothing gains by getting slower, balance is best."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references.machines import random_sequences, random_times, round_hardware, small_model
from tests.references.steps import EVERY, Step, some_times
from tests.references.timeline import reference_step

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.cost.prices import ExpertLaw
from equilibra.cost.rates import rates_for
from equilibra.plan.planner import Timing, planner_named
from equilibra.simulate.entry import compare
from equilibra.simulate.scenario import step_problems
from equilibra.simulate.step import simulate_step
from equilibra.simulate.timeline import run_group
from equilibra.simulate.times import RunSetting, Times

SEEDS = st.integers(0, 2**32 - 1)
RATES = ("dense_tflops", "attention_tflops", "attention_backward_tflops", "hbm_gb_per_s", "nvlink_gb_per_s",
         "nic_gb_per_s", "host_link_gb_per_s", "copy_engine_gb_per_s", "copy_loss_gb_per_s")  # fmt: skip
DELAYS = ("nvlink_latency_us", "nic_latency_us", "counts_us")


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_the_timeline_is_the_references(seed):
    rng, times, setting = some_times(seed)
    window = int(rng.integers(times.shape[1]))
    found = run_group(times, setting, window=window)
    step_us, stages = reference_step(times, setting)
    assert found.step_us == pytest.approx(step_us, abs=1e-6)
    layer_us = np.zeros_like(found.layer_us_PLM)
    for record, stage in zip(found.records, stages, strict=True):
        assert record.begin_us == pytest.approx([begin for _, begin, _ in stage.spans], abs=1e-6)
        chosen = [i for i, (one, _, _) in enumerate(stage.spans) if one.micro_batch == window]
        assert record.chosen.tolist() == chosen
        assert np.allclose(record.times_us, np.array([stage.columns[i] for i in chosen]), rtol=0, atol=1e-6)
        for one, begin, end in stage.spans:
            layer_us[one.stage + (one.backward or one.again), one.layer, one.micro_batch] += end - begin
    assert np.allclose(found.layer_us_PLM, layer_us, rtol=0, atol=1e-6)


def test_a_reference_with_another_rule_disagrees():
    """The comparison above can fail: links that do not let an all-to-all go first finish copies sooner."""
    differ = 0
    for seed in range(30):
        _, times, setting = some_times(seed)
        differ += abs(run_group(times, setting).step_us - reference_step(times, setting, copies_yield=False)[0]) > 1e-6
    assert differ > 10


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_nothing_gets_faster_when_a_time_grows(seed):
    rng, times, setting = some_times(seed)
    before = run_group(times, setting).step_us
    names = [field.name for field in fields(Times) if field.name not in ("exposed_copies", "host_path")]
    for name in rng.choice(names, 4, replace=False).tolist():
        value = getattr(times, name)
        if isinstance(value, np.ndarray):
            grown = value.copy()
            grown[tuple(rng.integers(size) for size in value.shape)] += float(rng.choice([0.1, 30, 1000]))
            if name == "plan_ready_us":
                grown = np.maximum.accumulate(grown)
        else:
            grown = value + float(rng.choice([0.1, 30, 1000]))
        assert run_group(replace(times, **{name: grown}), setting).step_us >= before - 1e-6, name
    assert run_group(times.without_overhead(), setting).step_us <= before + 1e-6


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_a_lower_maximum_is_never_slower(seed):
    """Other things the same, only the slowest rank counts, whoever it is; of each node, where copies come late."""
    rng, times, setting = some_times(seed)
    nodes = times.shape[3]
    times = replace(times, slowed_us=np.zeros_like(times.slowed_us))
    for step, parts in ((times, nodes), (times.without_overhead(), 1)):
        before = run_group(step, setting).step_us
        for name in ("experts_us", "inside_us", "across_us"):
            value = getattr(step, name)
            by_part = value.reshape(*value.shape[:-1], parts, -1)
            most = by_part.max(axis=-1, keepdims=True) * rng.choice([1.0, 0.7])
            lower = (np.minimum(rng.random(by_part.shape) * 1.5, 1.0) * most).reshape(value.shape)
            assert run_group(replace(step, **{name: lower}), setting).step_us <= before + 1e-6, name


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS)
def test_a_faster_machine_is_never_slower(seed):
    step = Step(seed)
    rng = np.random.default_rng(seed)
    for name in rng.choice(EVERY, 3, replace=False).tolist():
        planner = step.fixed(name)
        before = step.seconds(planner)
        for rate in RATES:
            assert step.seconds(planner, **{rate: 3 * getattr(step.machine, rate)}) <= before * (1 + 1e-12), rate
        for delay in DELAYS:
            assert step.seconds(planner, **{delay: 0.3 * getattr(step.machine, delay)}) <= before * (1 + 1e-12), delay
        assert step.seconds(planner, planner_cores=64) <= before * (1 + 1e-12)
        for law in ("experts_forward", "experts_backward"):
            of = getattr(step.machine, law)
            faster = ExpertLaw(fixed_us=of.fixed_us, weight_gb_per_s=of.weight_gb_per_s * 2,
                               row_gb_per_s=of.row_gb_per_s * 2, tflops=of.tflops * 2,
                               instance_gb_per_s=of.instance_gb_per_s * 2)  # fmt: skip
            assert step.seconds(planner, **{law: faster}) <= before * (1 + 1e-12), law


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_balanced_is_a_lower_bound_and_figures_agree(seed):
    step = Step(seed)
    found = compare(step.problems, EVERY, step.pricing()).metrics
    assert list(found) == [*EVERY, "balanced"]
    static, balanced = found["static"]["step_time_s"], found["balanced"]["step_time_s"]
    for name, row in found.items():
        assert 0 < row["share_of_balanced"] <= 1 + 1e-12, name
        assert row["share_of_balanced"] == pytest.approx(balanced / row["step_time_s"])
        assert row["speedup_over_static"] == pytest.approx(static / row["step_time_s"])
        assert row["exposed_overhead_s"] >= -1e-12
        assert 1 <= row["imbalance_mean"] <= row["imbalance_p99"] + row["imbalance_mean"]
        assert row["slowest_rank_over_bound"] >= 1
        assert all(np.isfinite(value) and value >= -1e-12 for value in row.values())
    for name in EVERY:
        result = simulate_step(step.problems, planner_named(name), step.pricing())
        for group in result.groups:  # every plan is above its own ideal, and above itself without overhead
            assert group.ideal_timeline.step_us <= group.free_timeline.step_us * (1 + 1e-12)
            assert group.free_timeline.step_us <= group.timeline.step_us * (1 + 1e-12)
            group.plan.check(group.load)


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_the_same_question_has_the_same_answer(seed):
    step = Step(seed)
    first, second = (json.dumps(compare(step.problems, EVERY, step.pricing()).metrics) for _ in range(2))
    assert first == second
    assert json.dumps(compare(Step(seed).problems, EVERY, step.pricing()).metrics) == first


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS)
def test_less_to_do_is_faster(seed):
    """Without the log-prob stage a step is shorter; without activation recompute too."""
    step = Step(seed, logprob_stage=True, activation_recompute=True)
    for name in ("static", "ultraep"):
        planner = step.fixed(name)
        whole = step.seconds(planner)
        for less in ({"logprob_stage": False}, {"activation_recompute": False}):
            step.setting = replace(step.setting, **less)
            assert step.seconds(planner) < whole, less
            step.setting = replace(step.setting, logprob_stage=True, activation_recompute=True)


def adverse() -> tuple[Times, RunSetting]:
    """A rank with much attention and few tokens to move beside one the other way round: each waits in its turn."""
    rng = np.random.default_rng(0)
    times = random_times(rng, layers=2, micro_batches=2, nodes=1, group=4).without_overhead()
    attention = np.zeros_like(times.attention_us)
    attention[:, :, 0] = 1000
    inside = np.zeros_like(times.inside_us)
    inside[..., 1:] = 200
    zero = np.zeros_like(inside)
    return replace(times, attention_us=attention, inside_us=inside, across_us=zero, reduce_us=0.0), RunSetting()


def test_balanced_is_a_lower_bound_when_attention_and_traffic_are_on_other_ranks():
    times, setting = adverse()
    experts = np.repeat(times.experts_us.mean(axis=3, keepdims=True), 4, axis=3)
    inside = np.repeat(times.inside_us.mean(axis=3, keepdims=True), 4, axis=3)
    even = replace(times, experts_us=experts, inside_us=inside)
    assert run_group(even, setting).step_us <= run_group(times, setting).step_us


def test_online_planners_pay_and_planned_ones_do_not():
    """The same plan, called online, is slower by at least counting and planning in every forward pass."""
    step = Step(5, logprob_stage=True, data_parallel=1, pipeline_stages=1)
    planner = step.fixed("equilibra")
    ahead = step.seconds(planner, planner_cores=10**6)
    planner.timing, planner.online_us = Timing.ONLINE, 70.0
    online = simulate_step(step.problems, planner, step.pricing())
    [group] = online.groups
    visits = 2 * group.plan.num_layers * group.plan.num_micro_batches
    exposed = visits * (70.0 + step.machine.counts_us) * 1e-6
    assert online.exposed_s >= exposed * (1 - 1e-12)
    assert online.step_s > ahead


def test_more_optimizer_steps_than_micro_batches_are_refused():
    rng = np.random.default_rng(0)
    model, machine = small_model(), round_hardware()
    sequences = random_sequences(rng, num_sequences=2, model=model, longest=9)
    cluster, rates = Cluster(num_nodes=1, ranks_per_node=2), rates_for(model, machine)
    with pytest.raises(InputError, match="1 micro-batches of 1000 tokens cannot make 2 optimizer steps"):
        step_problems(sequences, cluster, rates, tokens_per_microbatch=1000, optimizer_steps=2)


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_planners_that_pack_keep_the_optimizer_steps(seed):
    """Fewer micro-batches are fine, fewer optimizer steps are another training."""
    step = Step(seed, optimizer_steps=3, data_parallel=1)
    try:
        problems = step_problems(
            step.problems[0].sequences, step.cluster, step.problems[0].rates, tokens_per_microbatch=120,
            optimizer_steps=3,
        )  # fmt: skip
    except InputError:
        return  # the micro-batches of this step do not suffice
    result = simulate_step(problems, planner_named("equilibra"), step.pricing())
    assert all(group.plan.num_micro_batches >= 3 for group in result.groups)
