"""Events and records of simulated steps: what a report and Perfetto show is what the timeline did."""

from dataclasses import replace

import numpy as np
import pytest
from tests.references.steps import EVERY, Fixed, Step

from equilibra.core.plan import Stage
from equilibra.events.run import Run, load_run, save_run
from equilibra.events.schema import Direction, Events, Kind, Resource
from equilibra.plan.planner import planner_named
from equilibra.simulate.entry import compare
from equilibra.simulate.record import planner_record
from equilibra.simulate.step import simulate_step
from equilibra.simulate.times import RunSetting

SEEDS = range(6)
OF_A_VISIT = (Kind.ATTENTION, Kind.EXPERTS, Kind.WAIT, Kind.COUNTS, Kind.DISPATCH, Kind.COMBINE)


@pytest.fixture(scope="module")
def compared():
    found = []
    for seed in SEEDS:
        step = Step(seed)
        found.append((step, compare(step.problems, EVERY, step.pricing(), keep_records=True)))
    return found


def pipeline_stage_of_layer(step: Step) -> np.ndarray:
    layers, stages = step.model.num_layers, step.setting.pipeline_stages
    return np.concatenate([
        np.full(layers * (i + 1) // stages - layers * i // stages, i) for i in range(stages)
    ])  # fmt: skip


def test_no_rank_computes_two_things_at_once(compared):
    for step, found in compared:
        stage_of_layer = pipeline_stage_of_layer(step)
        for name, record in found.run.planners.items():
            rows = record.events.rows
            rows = rows[(rows["resource"] == Resource.COMPUTE) & (rows["layer"] >= 0)]
            for stage in range(step.setting.pipeline_stages):
                for rank in range(step.cluster.num_ranks):
                    own = rows[(rows["rank"] == rank) & (stage_of_layer[rows["layer"]] == stage)]
                    assert own.size, name
                    assert (own["end_us"][:-1] <= own["start_us"][1:] + 1e-6).all(), name


def test_work_and_waiting_explain_every_visit(compared):
    for step, found in compared:
        for name, record in found.run.planners.items():
            rows = record.events.rows
            rows = rows[np.isin(rows["kind"], OF_A_VISIT) & (rows["layer"] >= 0)]
            visits = np.unique(rows[["stage", "direction", "layer", "rank"]])
            passes = 1 + step.setting.activation_recompute + 1 + step.setting.logprob_stage
            assert visits.size == passes * step.model.num_layers * step.cluster.num_ranks, name
            for visit in visits:
                own = rows[rows[["stage", "direction", "layer", "rank"]] == visit]
                took = (own["end_us"] - own["start_us"]).sum()
                assert took == pytest.approx(own["end_us"].max() - own["start_us"].min(), abs=1e-4), name


def test_events_carry_the_tokens_and_lie_in_the_step(compared):
    for _, found in compared:
        for name, record in found.run.planners.items():
            rows, step_us = record.events.rows, 1e6 * found.metrics[name]["step_time_s"]
            assert rows["end_us"].max() <= step_us * (1 + 1e-9) + 1e-6, name
            assert (rows["start_us"] >= 0).all()
            experts = rows[rows["kind"] == Kind.EXPERTS]
            tokens = record.rank_tokens_LMR[experts["layer"], experts["micro_batch"], experts["rank"]]
            if name == "equilibra":  # its flash copies may differ by stage
                own = experts["stage"] == Stage.UPDATE.number
                assert np.array_equal(experts["tokens"][own], tokens[own]), name
            else:
                assert np.array_equal(experts["tokens"], tokens), name
            [window] = np.unique(experts["micro_batch"])
            assert 0 <= window < record.rank_tokens_LMR.shape[1]


def test_every_copy_has_its_events(compared):
    some = 0
    for step, found in compared:
        for name in EVERY:
            record = found.run.planners[name]
            rows, [window] = record.events.rows, np.unique(record.events.where(kind=Kind.EXPERTS)["micro_batch"])
            layers, micro_batches, _ = record.rank_tokens_LMR.shape
            count = np.diff(record.flash_first_of_problem).reshape(layers, micro_batches)[:, window].sum()
            back = rows[rows["kind"] == Kind.FLASH_GRADIENT]
            assert back.size == count, name
            again = Direction.FORWARD_AGAIN if step.setting.activation_recompute else Direction.BACKWARD
            for direction in (Direction.FORWARD, again):
                own = record.events.where(kind=Kind.FLASH_COPY, stage=Stage.UPDATE.number, direction=int(direction))
                assert own.size == count, name
                assert (own["bytes"] == step.model.expert_bytes).all()
                assert (own["resource"] == (
                    Resource.HOST_LINK if step.setting.update_path == "host" else Resource.COPY_ENGINE
                )).all()  # fmt: skip
            assert (back["bytes"] == step.model.expert_gradient_bytes).all()
            standing = rows[rows["kind"] == Kind.STANDING_COPY]
            assert standing.size == record.standing_layer.size
            some += count + standing.size
            counts = rows[rows["kind"] == Kind.COUNTS]
            assert (counts.size > 0) == (name != "equilibra"), name
            assert (rows[rows["kind"] == Kind.PLAN].size > 0) == (name == "equilibra")
    assert some > 0


def test_records_are_exact_and_survive_a_round_trip(compared, tmp_path):
    for number, (step, found) in enumerate(compared):
        load = step.problems[0].load
        for name in ("static", "ultraep"):
            record = found.run.planners[name]
            plan = planner_named(name).plan(step.problems[0])
            assert np.array_equal(record.rank_tokens_LMR, plan.rank_load(load))
            assert np.array_equal(record.expert_tokens_LME, load.expert_load().transpose(1, 0, 2))
            assert np.array_equal(record.rank_tokens_LMR.sum(axis=2), record.expert_tokens_LME.sum(axis=2))
            assert record.flash_tokens.sum() == plan.stages[Stage.UPDATE].tokens_FR.sum()
        run = Run(about={"kind": "simulated"}, planners=found.run.planners)
        save_run(run, tmp_path / str(number))
        read = load_run(tmp_path / str(number))
        assert read.about == run.about
        assert list(read.planners) == list(run.planners)
        for name, record in run.planners.items():
            same = read.planners[name]
            assert same.metrics == record.metrics
            assert same.memory == record.memory
            for field in record.__dataclass_fields__:
                if isinstance(value := getattr(record, field), np.ndarray):
                    assert np.array_equal(value, getattr(same, field)), field
            assert np.array_equal(same.events.rows, record.events.rows)


def test_events_of_each_stage_have_the_tokens_of_that_stage():
    """Flash copies may differ by stage: here the log-prob stage has none."""
    step = Step(2, logprob_stage=True, data_parallel=1)
    [problem] = step.problems
    problem = replace(problem, spare_slots=2)
    planners = {name: planner_named(name) for name in ("static", "ultraep")}
    plans = {name: planner.plan(problem) for name, planner in planners.items()}
    stages = {
        Stage.LOGPROB: plans["static"].stages[Stage.LOGPROB], Stage.UPDATE: plans["ultraep"].stages[Stage.UPDATE],
    }  # fmt: skip
    mixed = Fixed(planners["ultraep"], {id(problem): replace(plans["ultraep"], stages=stages)})
    [group] = simulate_step([problem], mixed, step.pricing()).groups
    experts = planner_record(group, step.pricing(), {}).events.where(kind=Kind.EXPERTS)
    rows = np.stack([group.plan.rank_load(group.load, stage) for stage in Stage])
    assert not np.array_equal(rows[0], rows[1])
    where = experts["stage"], experts["layer"], experts["micro_batch"], experts["rank"]
    assert np.array_equal(experts["tokens"], rows[where])
    assert (group.times.flash_us[0] == 0).all()
    assert (group.times.flash_us[1] > 0).any()


def test_the_chosen_micro_batch_is_the_one_recorded():
    step = Step(3, data_parallel=1)
    for window in (0, 1):
        result = simulate_step(step.problems, planner_named("ultraep"), step.pricing(), window=window)
        record = planner_record(result.groups[0], step.pricing(), {})
        assert np.unique(record.events.where(kind=Kind.EXPERTS)["micro_batch"]).tolist() == [window]


def test_a_rank_waits_for_an_online_copy():
    """The copy starts after dispatch, so the ranks of its node stand still meanwhile, and the events say so."""
    step = Step(2, data_parallel=1)
    step.setting = RunSetting(logprob_stage=False, activation_recompute=False)
    pricing = replace(step.pricing(nvlink_gb_per_s=0.01, copy_engine_gb_per_s=0.01), setting=step.setting)
    result = simulate_step(step.problems, planner_named("ultraep"), pricing)
    [group] = result.groups
    record = planner_record(group, pricing, {})
    assert group.plan.stages[Stage.UPDATE].num_copies
    waits = record.events.where(kind=Kind.WAIT, direction=int(Direction.FORWARD))
    assert waits.size
    assert result.exposed_s > 0


def test_events_reject_nonsense():
    step = Step(1, data_parallel=1)
    rows = simulate_events(step).rows
    for column, value, match in (
        ("start_us", np.nan, "finite"), ("end_us", np.inf, "finite"), ("end_us", -1.0, "end before"),
        ("kind", 99, "unknown kind"), ("resource", 6, "unknown resource"), ("stage", 2, "unknown stage"),
        ("direction", 3, "unknown direction"),
    ):  # fmt: skip
        changed = rows.copy()
        changed[column][0] = value
        with pytest.raises(ValueError, match=match):
            Events(rows=changed)
    with pytest.raises(ValueError, match="sorted"):
        Events(rows=rows[::-1].copy())
    with pytest.raises(ValueError, match="columns"):
        Events(rows=rows[["kind", "rank"]].copy())


def simulate_events(step: Step) -> Events:
    result = simulate_step(step.problems, planner_named("static"), step.pricing())
    return planner_record(result.groups[0], step.pricing(), {}).events
