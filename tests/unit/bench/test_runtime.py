"""Cases, contenders, clock, processes and checks of the runtime bench; all of it: cli/test_bench_runtime.py."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.runtime import clock as runtime_clock
from benchmarks.runtime import figures
from benchmarks.runtime import processes as runtime_processes
from benchmarks.runtime.case import CLUSTER, Select, Shape, case_of
from benchmarks.runtime.clock import Clock, busy_seconds
from benchmarks.runtime.contenders import (
    BALANCED,
    EPLB,
    NAMES,
    balanced_routing,
    contenders,
    counted,
    on_even_homes,
)
from benchmarks.runtime.setting import RuntimeSetting, cases_for
from equilibra.core.errors import BudgetError, ExecuteError, InputError, PlanError
from equilibra.core.load import StepLoad, imbalance
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.plan.baselines import Balanced, Eplb
from equilibra.plan.baselines.assemble import step_plan
from equilibra.plan.planner import StepProblem
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize


def recording(*, experts=16, top_k=3, layers=5, skew=1.0, length=60.0, seed=3, last=True):
    size = SynthShape(num_prompts=8, answers_per_prompt=4, num_layers=layers, num_experts=experts, top_k=top_k)
    knobs = SynthKnobs(popularity_skew=skew, median_length=length)
    return synthesize(size, knobs, seed=seed, record_last_token=last)


def case(select=Select.EVEN, **knobs):
    return case_of(recording(**knobs), "made", tokens=400, num_micro_batches=3, num_layers=2, select=select)


def slowest_over_mean(load: StepLoad) -> float:
    load_MLE = load.expert_load()
    return float(imbalance(load_MLE.reshape(*load_MLE.shape[:2], 2, -1).sum(axis=3)).mean())


# --- cases ---


@pytest.mark.parametrize("select", Select)
def test_a_case_has_the_tokens_that_the_simulator_counts(select):
    made = case(select)
    assert made.load.tokens_MLER.shape == (3, 2, 16, 2)
    assert np.array_equal(counted(made.experts_MR, 16).tokens_MLER, made.load.tokens_MLER)
    assert all(experts.shape[1:] == (2, 3) for ranks in made.experts_MR for experts in ranks)
    assert made.num_tokens * 3 * 2 == made.load.tokens_MLER.sum()


def test_whole_sequences_of_the_recording_and_nothing_else():
    trace = recording()
    made = case_of(trace, "made", tokens=800, num_micro_batches=2, num_layers=5, select=Select.EVEN)
    assert made.notes == []
    wanted = {trace.ids[a:b].astype(np.int64).tobytes() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)}
    for ranks in made.experts_MR:
        assert 560 <= sum(len(experts) for experts in ranks) <= 800
        for experts in ranks:
            found, start = 0, 0
            for end in range(1, len(experts) + 1):
                if experts[start:end].tobytes() in wanted:
                    found, start = found + 1, end
            assert found > 0
            assert start == len(experts)


def test_skewed_is_what_it_says():
    assert slowest_over_mean(case(Select.SKEWED).load) > slowest_over_mean(case(Select.EVEN).load) + 0.05
    assert "most skewed" in case(Select.SKEWED).name
    assert "evenly" in case(Select.EVEN).name


def test_tokens_without_routing_are_left_out_and_long_sequences_cut():
    made = case_of(recording(last=False, length=300.0), "made", tokens=400, num_micro_batches=2, num_layers=1,
                   select=Select.EVEN)  # fmt: skip
    assert made.notes[0] == "32 tokens without recorded routing left out"
    assert "cut into pieces" in made.notes[1]
    assert np.array_equal(counted(made.experts_MR, 16).tokens_MLER, made.load.tokens_MLER)
    assert all(len(experts) > 0 for ranks in made.experts_MR for experts in ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 6}, "5 MoE layers, 6"),
        ({"num_micro_batches": 50}, "50 were asked for"),
        ({"num_micro_batches": 50, "select": Select.SKEWED}, "too short"),
        ({"tokens": 1}, "too few"),
    ],
)
def test_what_a_recording_does_not_have(changes, message):
    wanted = {"tokens": 400, "num_micro_batches": 2, "num_layers": 1, "select": Select.EVEN, **changes}
    with pytest.raises(InputError, match=message):
        case_of(recording(), "made", **wanted)


def test_an_odd_number_of_experts_does_not_fit_two_ranks():
    with pytest.raises(InputError, match="15"):
        case(experts=15)


def test_real_routing_has_a_case_where_static_is_bad(traces):
    cases, left_out = cases_for(RuntimeSetting(), trace=None, select=Select.EVEN, traces=traces)
    assert left_out == []
    assert [made.name.split(",")[0] for made in cases] == ["dsv2-lite-law", "gpt-oss-20b", "gpt-oss-20b"]
    assert slowest_over_mean(cases[2].load) >= 1.5
    assert slowest_over_mean(cases[0].load) < 1.3


def test_without_recordings_routing_is_synthetic_and_says_so(tmp_path):
    cases, left_out = cases_for(RuntimeSetting(), trace=None, select=Select.EVEN, traces=None)
    assert left_out == ["dsv2-lite-law", "gpt-oss-20b"]
    assert all(made.name.startswith("synthetic") for made in cases)
    assert slowest_over_mean(cases[-1].load) >= 1.5
    with pytest.raises(InputError, match="has none of"):
        cases_for(RuntimeSetting(), trace=None, select=Select.EVEN, traces=tmp_path)


def test_shapes_fit_memory():
    shape = RuntimeSetting().shape_for(case())
    assert (shape.hidden, shape.ffn) == (512, 512)
    many = case(experts=1024, top_k=8)
    assert RuntimeSetting().shape_for(many).hidden == 128
    with pytest.raises(BudgetError, match="use smaller --hidden"):
        RuntimeSetting(hidden=2**16, ffn=2**16).shape_for(many)


# --- contenders ---


def problem(load: StepLoad, spare_slots=2) -> StepProblem:
    return StepProblem(cluster=CLUSTER, given_load=load, rates=Rates.free(), spare_slots=spare_slots)


@pytest.mark.parametrize("spare_slots", [1, 2, 5])
@pytest.mark.parametrize("skew", [0.5, 3.0])
def test_eplb_from_even_homes_gives_every_rank_the_same_rows(skew, spare_slots):
    made = case(skew=skew)
    plan = Eplb().plan(problem(made.load, spare_slots))
    same = on_even_homes(made, plan)
    for stage in Stage:
        assert np.array_equal(same.plan.rank_load(same.load, stage), plan.rank_load(made.load, stage))
    same.plan.check(same.load, spare_slots=0)
    assert same.plan.placement.is_even()
    assert same.plan.migration.num_moves == 0
    assert np.array_equal(counted(same.experts_MR, 16).tokens_MLER, same.load.tokens_MLER)
    loads = [np.sort(load.expert_load(), axis=2) for load in (same.load, made.load)]
    assert np.array_equal(*loads)  # the same experts under other numbers
    assert same.plan.standing.num_copies <= made.load.num_layers * 2 * spare_slots


@pytest.mark.parametrize("homes", [[0, 0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]])
def test_instances_that_allow_no_even_homes_get_homes_without_rows(homes):
    made = case(experts=8)
    plan = step_plan(problem(made.load), "by hand", home_of_expert=np.tile(np.array(homes, np.int32), (2, 1)))
    same = on_even_homes(made, plan)
    assert same.plan.placement.is_even()
    same.plan.check(same.load)
    assert np.array_equal(same.plan.rank_load(same.load), plan.rank_load(made.load))
    assert same.plan.standing.num_copies == 2 * (max(homes.count(0), homes.count(1)) - 4)


def test_flash_copies_cannot_be_numbered_anew():
    made = case()
    with pytest.raises(PlanError, match="other rows"):
        on_even_homes(made, Balanced().plan(problem(made.load)))


@pytest.mark.parametrize(("experts", "top_k"), [(16, 3), (6, 4), (8, 8), (4, 1)])
def test_forced_balanced_routing_is_even_to_one_row(experts, top_k):
    made = case(experts=experts, top_k=top_k)
    even = balanced_routing(made.experts_MR, experts)
    load = counted(even, experts)
    of_expert, of_rank = load.expert_load(), load.expert_load().reshape(3, 2, 2, -1).sum(axis=3)
    assert (of_expert.max(axis=2) - of_expert.min(axis=2)).max() <= 1
    assert (of_rank.max(axis=2) - of_rank.min(axis=2)).max() <= 1
    assert np.array_equal(of_rank.sum(axis=2), made.load.tokens_MLER.sum(axis=(2, 3)))  # no row more or less
    for before, after in zip(made.experts_MR, even, strict=True):
        for old, new in zip(before, after, strict=True):
            assert new.shape == old.shape
            assert (np.diff(np.sort(new, axis=2), axis=2) > 0).all()  # a token's experts differ


def test_contenders_are_complete_and_the_recorded_routing_is_not_even():
    made = case(skew=2.0)
    every = contenders(made, rates=Rates.free(), spare_slots=2)
    assert tuple(contender.name for contender in every) == NAMES
    ratio = {}
    for contender in every:
        contender.plan.check(contender.load, spare_slots=2)
        assert contender.plan.placement.is_even()
        assert contender.load.tokens_MLER.sum() == made.load.tokens_MLER.sum()
        ratio[contender.name] = imbalance(contender.plan.rank_load(contender.load)).mean()
    assert ratio[BALANCED] <= 1.005
    assert ratio["equilibra"] <= 1.01
    assert ratio[BALANCED] <= ratio["equilibra"] <= ratio[EPLB] < ratio["static"]
    assert ratio["static"] > 1.05


# --- clock ---


def clock_where_others_have(shares, monkeypatch, *, patience_s):
    """A clock for which every step and every wait takes a second."""
    busy = iter([value for share in shares for value in (0.0, share)])
    monkeypatch.setattr(runtime_clock, "perf_counter", iter(np.arange(0.0, 100.0)).__next__)
    monkeypatch.setattr(runtime_clock, "process_time", lambda: 0.0)
    monkeypatch.setattr(runtime_clock, "sleep", lambda _seconds: None)
    monkeypatch.setattr(runtime_clock, "busy_seconds", busy.__next__)
    return Clock(prepare=lambda: None, largest=lambda value: value, patience_s=patience_s)


@pytest.mark.parametrize(
    ("shares", "patience_s", "chosen", "again"),
    [
        ([0.0], 9, 0.0, 0),  # undisturbed: not run again
        ([0.5], 0, 0.5, 0),  # no patience
        ([0.5, 0.0, 0.01], 9, 0.01, 1),  # disturbed, quiet, run again
        ([0.5, 0.4, 0.3, 0.0, 0.2, 0.0, 0.0], 9, 0.0, 2),  # wait as long as it takes
        ([0.1, 0.4, 0.4, 0.3], 2, 0.1, 1),  # patience ends while waiting: once more, and the least disturbed counts
    ],
)
def test_a_disturbed_step_is_run_again_while_patience_lasts(shares, patience_s, chosen, again, monkeypatch):
    clock = clock_where_others_have(shares, monkeypatch, patience_s=patience_s)
    assert clock.time(lambda: None) == (1.0, chosen, None)
    assert clock.run_again == again


def test_short_steps_are_never_disturbed(monkeypatch):
    clock = clock_where_others_have([0.5], monkeypatch, patience_s=9)
    monkeypatch.setattr(runtime_clock, "SHORT_S", 1.5)
    assert clock.time(lambda: None) == (1.0, 0.0, None)


def test_what_a_core_was_busy_with(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 100 10 50 7000 30 5 5 30 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert busy_seconds(stat) == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    assert busy_seconds(stat) is None
    assert busy_seconds(tmp_path / "none") is None


# --- processes ---


def test_ranks_get_cores_of_their_own(monkeypatch):
    cores = runtime_processes.cores_for_ranks()
    if cores is not None:
        assert len(set(cores)) == 2
        siblings = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores]
        if all(file.is_file() for file in siblings):
            assert len({file.read_text() for file in siblings}) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert runtime_processes.cores_for_ranks() is None


def _fail(pipe, what) -> None:
    if what == "dies":
        os._exit(7)
    pipe.send(runtime_processes._Failure(kind="X", text=what, is_input=what == "input", is_echo=what == "echo"))


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (("dies", "echo"), ExecuteError, "rank 0 .* exit code 7"),
        (("echo", "cause"), ExecuteError, "rank 1 .* X: cause"),
        (("echo", "input"), InputError, "^input$"),
    ],
)
def test_a_rank_that_fails_or_dies_is_an_error_that_names_the_cause(said, kind, message):
    context = multiprocessing.get_context("spawn")
    ranks = []
    for what in said:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_fail, args=(theirs, what), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    with pytest.raises(kind, match=message):
        runtime_processes._listen(ranks, print)
    for process, _ in ranks:
        process.join()


def test_silent_ranks_are_given_up(monkeypatch):
    monkeypatch.setattr(runtime_processes, "SILENCE_S", 0.1)
    mine, theirs = multiprocessing.Pipe(duplex=False)
    with pytest.raises(ExecuteError, match="said nothing"):
        runtime_processes._listen([(multiprocessing.current_process(), mine)], print)
    theirs.close()


def test_a_rank_that_cannot_start_its_work_says_why():
    pytest.importorskip("torch")
    from tests.distributed.ranks import start_server

    start_server()
    shape = Shape(hidden=8, ffn=8, spare_slots=2, path="nowhere", repeats=1)
    with pytest.raises(ExecuteError, match="nowhere"):
        runtime_processes.run_on_ranks(figures._measure, (case(), shape), print, timeout_s=shape.timeout_s)
    assert "MALLOC_MMAP_MAX_" not in os.environ


# --- checks ---


def events_of(contender, rank, *, lost=0):
    """What the runtime records when it executes a plan; `lost` rows of the last event are missing."""

    from equilibra.events.schema import Direction, Events, Kind, event_table

    parts = []
    for stage in Stage:
        load_LM = contender.plan.rank_load(contender.load, stage)[:, :, rank]
        layer, micro_batch = (index.ravel() for index in np.indices(load_LM.shape))
        parts += [
            event_table(
                layer.size, kind=Kind.EXPERTS, stage=stage.number, direction=direction, layer=layer,
                micro_batch=micro_batch, rank=rank, tokens=load_LM.ravel(),
            )
            for direction in (Direction.FORWARD, Direction.BACKWARD)[: 1 + (stage is Stage.UPDATE)]
        ]  # fmt: skip
    parts[-1]["tokens"][-1] -= lost
    return Events.of(*parts)


def test_executed_rows_are_compared_with_simulated_ones():
    pytest.importorskip("torch")
    from benchmarks.runtime.rank import check_rows

    for contender in contenders(case(skew=2.0), rates=Rates.free(), spare_slots=2):
        for rank in range(2):
            assert check_rows(contender, rank, events_of(contender, rank)) == 3 * 2 * 3  # passes, layers, micro-batches
            with pytest.raises(ExecuteError, match=f"update, backward: rank {rank} executed"):
                check_rows(contender, rank, events_of(contender, rank, lost=1))


def _differences(changed: bool) -> list[float]:
    """On a rank: differences of all contenders from the plain layer, whose weights may be others than the runtime's."""
    import torch

    from benchmarks.runtime.layers import RankLayers
    from benchmarks.runtime.rank import check_results
    from equilibra.execute.group import join_expert_group

    made = case(skew=2.0)
    layers = RankLayers(made, Shape(hidden=8, ffn=4, spare_slots=2, path="collective", repeats=1),
                        join_expert_group(CLUSTER, timeout_s=60))  # fmt: skip
    if changed and layers.group.rank == 1:
        with torch.no_grad():
            other = layers.plain[0].down_of_home[2]
            layers.plain[0].down_of_home[2] = torch.nn.Parameter(other * 1.01)
    return [check_results(layers, made) for made in contenders(made, rates=Rates.free(), spare_slots=2)]


def test_outputs_and_gradients_are_compared_with_the_plain_layer():
    pytest.importorskip("torch")
    from tests.distributed.ranks import run_ranks

    for differences in run_ranks(2, _differences, False):
        assert max(differences) < 1e-5
    with pytest.raises(AssertionError, match="differ from the plain layer's"):
        run_ranks(2, _differences, True)
