"""What a training run leaves for its report: the measured step, two predictions at its pace, and the curves."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equilibra.core.load import imbalance
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates
from equilibra.events.run import load_run
from equilibra.events.schema import EVENT, Direction, Events, Kind
from equilibra.execute.steps.planning import own_schedule
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.report.page import render
from equilibra.simulate.entry import predict
from equilibra.simulate.times import Pricing, RunSetting
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads
from equilibra.train.config import TrainConfig
from equilibra.train.last_step import FREE_GB_PER_S, LastStep, paced
from equilibra.train.metrics import MAX_POINTS, History, MetricsFile, curves

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)
MODEL = MoEModel(name="qwen3_moe", num_layers=3, hidden=64, expert_ffn=32, num_experts=16, top_k=4)
TOKENS_PER_RANK = 450


@pytest.fixture(scope="module")
def loads():
    shape = SynthShape(num_prompts=8, answers_per_prompt=4, num_layers=3, num_experts=16, top_k=4)
    return synthesize_loads(shape, SynthKnobs(median_length=120, max_length=400), seed=1)


@pytest.fixture(scope="module")
def owner(loads):
    return np.arange(loads.num_sequences) % CLUSTER.num_ranks


def problem_of(loads, owner) -> StepProblem:
    mini_batches = np.arange(loads.num_sequences) // (loads.num_sequences // 2)
    own = own_schedule(
        loads.length_of_sequence, owner, mini_batches, num_ranks=CLUSTER.num_ranks, tokens_per_rank=TOKENS_PER_RANK
    )
    return StepProblem(
        cluster=CLUSTER, sequences=loads, schedule=own.schedule, mini_batch_of_sequence=mini_batches,
        tokens_per_rank=TOKENS_PER_RANK, rates=Rates.free(),
    )  # fmt: skip


def slow_machine() -> Pricing:
    """A machine of one link speed on which everything takes longer, each kind of work by a factor of its own."""
    base = prices_named("h200")

    def law(of, factor):
        return replace(of, weight_gb_per_s=of.weight_gb_per_s / factor, row_gb_per_s=of.row_gb_per_s / factor,
                       tflops=of.tflops / factor, instance_gb_per_s=of.instance_gb_per_s / factor)  # fmt: skip

    hardware = replace(
        base, hbm_gb_per_s=FREE_GB_PER_S, experts_forward=law(base.experts_forward, 700.0),
        experts_backward=law(base.experts_backward, 900.0), dense_tflops=base.dense_tflops / 300,
        attention_tflops=base.attention_tflops / 300, attention_backward_tflops=base.attention_backward_tflops / 300,
        nvlink_gb_per_s=base.nic_gb_per_s / 50, nic_gb_per_s=base.nic_gb_per_s / 50,
    )  # fmt: skip
    return Pricing(model=MODEL, hardware=hardware, cluster=CLUSTER, setting=RunSetting())


def on_h200() -> Pricing:
    return replace(slow_machine(), hardware=prices_named("h200"))


def kinds(record) -> dict[str, float]:
    rows = record.events.rows
    us = rows["end_us"] - rows["start_us"]
    return {
        f"{kind.name} {backward}": float(
            us[(rows["kind"] == kind) & ((rows["direction"] == Direction.BACKWARD) == backward)].sum()
        )
        for kind in (Kind.EXPERTS, Kind.ATTENTION, Kind.DISPATCH, Kind.COMBINE)
        for backward in (False, True)
    }


@pytest.mark.parametrize("planner", ["equilibra", "static"])
def test_pace_is_that_of_the_measured_machine(loads, owner, planner):
    plan = planner_named(planner).plan(problem_of(loads, owner))
    measured = predict(plan, loads, slow_machine(), window=1)
    found = paced(measured, plan, loads, on_h200(), spare_slots=2)
    again = predict(plan, loads, found, window=1)
    assert kinds(again) == pytest.approx(kinds(measured), rel=0.02)  # copies slow experts a little
    assert again.metrics["step_time_s"] == pytest.approx(measured.metrics["step_time_s"], rel=0.02)
    before = predict(plan, loads, on_h200(), window=1)
    assert before.metrics["step_time_s"] < 0.5 * measured.metrics["step_time_s"]  # the check can fail


def test_pace_without_events_is_that_of_the_base(loads, owner):
    plan = planner_named("equilibra").plan(problem_of(loads, owner))
    silent = replace(predict(plan, loads, slow_machine(), window=1), events=Events(rows=np.zeros(0, EVENT)))
    hardware = paced(silent, plan, loads, on_h200(), spare_slots=2).hardware
    assert hardware.experts_forward == prices_named("h200").experts_forward
    assert hardware.dense_tflops == prices_named("h200").dense_tflops


def last_step(folder, loads, owner, planner: str) -> LastStep:
    """A rank 0 that has run one step on the slow machine; what it is made of stands in for the real parts."""
    plan = planner_named(planner).plan(problem_of(loads, owner))
    measured = predict(plan, loads, slow_machine(), window=1)
    spec = SimpleNamespace(hidden=64, expert_ffn=32, num_experts=16, top_k=4)
    config = TrainConfig()
    parts = SimpleNamespace(
        config=replace(config, balance=replace(config.balance, tokens_per_rank=TOKENS_PER_RANK)),
        folder=SimpleNamespace(spec=spec, config=SimpleNamespace(model_type="qwen3_moe", vocab_size=100)),
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    step = SimpleNamespace(
        plan=plan, sequence_loads=loads, route=SimpleNamespace(owner_of_sequence=owner),
        num_tokens=int(loads.length_of_sequence.sum()),
    )  # fmt: skip
    last = LastStep(parts, folder)
    last.keep(4, None, SimpleNamespace(step=None))  # another rank's
    last.keep(5, replace(measured, metrics={**measured.metrics, "step_time_s": 3.5}), SimpleNamespace(step=step))
    return last


def report_steps(path, count: int) -> MetricsFile:
    metrics = MetricsFile(path)
    for step in range(count):
        if step % 2 == 0:
            metrics.evaluated(step, {"reward_held_out": 0.1 * step})
        metrics.step(
            step, {"reward": 0.1 * step, "imbalance": 1.0, "seconds": 2.0, "seconds_update": 1.5, "kl": math.nan}
        )
    return metrics


def test_writes_measured_predicted_and_static(tmp_path, loads, owner):
    report_steps(tmp_path / "metrics.jsonl", 6)
    last_step(tmp_path, loads, owner, "equilibra").write()
    run = load_run(tmp_path / "step.run")
    assert list(run.planners) == ["static", "equilibra", "predicted"]
    assert run.about["predicted"] == ["static", "predicted"]
    assert run.planners["equilibra"].metrics["step_time_s"] == 3.5
    static = run.planners["static"]
    problem = problem_of(loads, owner)
    load_MLR = problem.load.expert_load().reshape(-1, 3, 4, 4).sum(axis=3)  # contiguous homes, four experts a rank
    np.testing.assert_array_equal(static.rank_tokens_LMR, load_MLR.transpose(1, 0, 2))
    assert static.metrics["imbalance_mean"] == pytest.approx(float(imbalance(load_MLR).mean()))
    assert static.metrics["copies_per_layer"] == static.metrics["migration_bytes"] == 0
    assert static.metrics["imbalance_mean"] > 1.1 > run.planners["predicted"].metrics["imbalance_mean"]
    assert static.metrics["step_time_s"] > run.planners["predicted"].metrics["step_time_s"]
    assert "Training" in render(run)


def test_static_run_has_one_static_record_and_it_is_the_measured_one(tmp_path, loads, owner):
    last_step(tmp_path, loads, owner, "static").write()
    run = load_run(tmp_path / "step.run")
    assert list(run.planners) == ["static", "predicted"]
    assert run.about["predicted"] == ["predicted"]
    assert run.planners["static"].metrics["step_time_s"] == 3.5


def test_curves_are_read_from_the_file(tmp_path, loads, owner):
    metrics = report_steps(tmp_path / "metrics.jsonl", 6)
    metrics.cut(4)  # resumed from there
    metrics.step(4, {"reward": 0.9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')  # torn
    last_step(tmp_path, loads, owner, "equilibra").write()
    told = load_run(tmp_path / "step.run").about["training"]
    assert told["num_steps"] == 5
    assert told["steps"]["step"] == [0, 1, 2, 3, 4]
    assert told["steps"]["reward"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.9])
    assert told["steps"]["seconds_update"] == [1.5, 1.5, 1.5, 1.5, None]
    assert "kl" not in told["steps"]  # never a number
    assert told["held_out"] == {"step": [0, 2], "reward": [0.0, 0.2]}


@pytest.mark.parametrize("spoil", ["missing", "empty", "folder"])
def test_a_run_without_curves_still_has_its_step(tmp_path, loads, owner, spoil):
    if spoil == "empty":
        (tmp_path / "metrics.jsonl").touch()
    if spoil == "folder":
        (tmp_path / "metrics.jsonl").mkdir()
    last_step(tmp_path, loads, owner, "equilibra").write()
    assert "training" not in load_run(tmp_path / "step.run").about


def test_nothing_is_written_without_a_record(tmp_path):
    LastStep(SimpleNamespace(), tmp_path).write()
    assert list(tmp_path.iterdir()) == []


def long_history(count: int) -> History:
    history = History()
    for step in range(count):
        history.steps[step] = {"reward": step + 1 / 3, "seconds": math.inf, "seconds_update": 1.0}
        history.evaluations[step] = {"reward_held_out": 0.5}
    return history


@pytest.mark.parametrize(("count", "every"), [(1, 1), (MAX_POINTS, 1), (MAX_POINTS + 1, 2), (3 * MAX_POINTS - 1, 3)])
def test_long_runs_are_thinned_and_end_with_their_last_step(count, every):
    told = curves(long_history(count))
    assert (told["num_steps"], told["every"]) == (count, every)
    assert told["steps"]["step"][-1] == count - 1
    assert set(np.diff(told["steps"]["step"])) <= {every}
    assert len(told["steps"]["step"]) == len(told["steps"]["reward"]) <= MAX_POINTS
    assert len(told["held_out"]["step"]) <= MAX_POINTS
    assert "seconds" not in told["steps"]
    assert len(json.dumps(told, allow_nan=False)) < 1_000_000


def test_no_steps_no_curves():
    assert curves(History()) is None
