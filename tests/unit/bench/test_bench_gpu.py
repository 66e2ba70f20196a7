"""Cases, works, contenders, replay, times and laws of the GPU bench; the command: test_bench_gpu_command.py."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from benchmarks import suite
from benchmarks.gpu import laws, measure, replay
from benchmarks.gpu.case import GpuSetting, case_of, cases_for, routing_of
from benchmarks.gpu.contenders import (
    BALANCED,
    EPLB,
    EQUILIBRA,
    NAMES,
    ONLINE,
    OTHER_PATH,
    STATIC,
    STILL_ONE,
    TILE_ROWS,
    contenders,
    seconds_to_plan,
)
from benchmarks.gpu.figures import case_result, device_named
from benchmarks.gpu.measure import Measured
from benchmarks.gpu.records import (
    FIELDS,
    NEIGHBOURS,
    Records,
    layer_times,
    load_records,
    relative_times,
    save_records,
    settled_ratio,
    spread,
)
from benchmarks.gpu.replay import RankTimes, Replay, Sizes
from benchmarks.gpu.roofline import measured_ceilings, pass_bytes, pass_flop, roofline
from benchmarks.gpu.work import STILL, Moves, RankWork, balanced_works, moves_of, works_of
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.core.plan import Stage
from equilibra.cost.calibrate import calibrate
from equilibra.cost.compute import ExpertLaw, row_bytes
from equilibra.cost.presets import hardware_named
from equilibra.cost.rates import rates_for
from equilibra.execute.kernels import grouped
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

TINY = MoEModel(name="tiny", num_layers=4, hidden=16, expert_ffn=16, num_experts=16, top_k=2)
SETTING = GpuSetting(tokens_per_rank=64, repeats=2, ranks_per_node=4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def routing():
    size = SynthShape(num_prompts=6, answers_per_prompt=4, num_layers=4, num_experts=16, top_k=2)
    return routing_of("made", [synthesize(size, SynthKnobs(popularity_skew=1.5, median_length=40.0, max_length=120))])


@pytest.fixture(scope="module")
def case(routing):
    return case_of(routing, TINY, 4, SETTING)


# --- cases ---


def test_a_case_has_the_micro_batches_and_layers_that_were_asked_for(case, routing):
    assert case.load.tokens_MLER.shape == (2, 2, 16, 4)
    assert case.layers == [1, 3]
    per_layer = case.load.tokens_MLER.sum(axis=(2, 3))
    assert (per_layer > 0.85 * 64 * 4 * 2).all()  # full, but for tokens whose routing is not recorded
    assert (per_layer <= 64 * 4 * 2).all()
    assert case.name == "made, tiny, EP 4"
    assert case.model.num_experts == 16
    assert case.static_imbalance()["of_step"] > 1.1


def test_a_short_recording_is_repeated_and_says_so(routing):
    long = case_of(routing, TINY, 4, replace(SETTING, tokens_per_rank=600))
    assert any("repeated" in note for note in long.notes)
    tokens = long.load.tokens_MLER.sum(axis=(2, 3)) / 2
    assert (tokens > 0.85 * 2400).all()
    few = case_of(routing, TINY, 4, replace(SETTING, tokens_per_rank=32, micro_batches=1))
    assert not any("repeated" in note for note in few.notes)


def test_cases_that_cannot_run_are_left_out_with_a_reason(routing):
    cases, left_out = cases_for([routing], [TINY], [4, 6, 32], SETTING)
    assert [case.cluster.num_ranks for case in cases] == [4]
    assert [one["case"] for one in left_out] == ["made, tiny, EP 6", "made, tiny, EP 32"]
    assert "whole nodes" in left_out[0]["reason"]
    assert "experts must be a multiple of ranks" in left_out[1]["reason"]
    with pytest.raises(InputError, match="no case can run"):
        cases_for([routing], [TINY], [32], SETTING)


def test_recordings_of_different_models_are_not_joined():
    def made(experts):
        size = SynthShape(num_prompts=1, answers_per_prompt=2, num_layers=1, num_experts=experts, top_k=1)
        return synthesize(size, SynthKnobs(median_length=9.0))

    with pytest.raises(InputError, match="different models"):
        routing_of("both", [made(4), made(8)])


# --- works ---


@pytest.mark.parametrize("name", ["static", "eplb-oracle", "ultraep", "equilibra", "balanced"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_rows_of_ranks_are_those_of_the_plan(routing, name, num_ranks):
    case = case_of(routing, TINY, num_ranks, SETTING)
    problem = StepProblem(
        cluster=case.cluster, given_load=case.load, rates=rates_for(TINY, num_nodes=case.cluster.num_nodes)
    )
    plan = planner_named(name).plan(problem)
    works = works_of(plan, case.load)
    rows_LMR = np.array([[[work.num_rows for work in ranks] for ranks in layer] for layer in works])
    assert np.array_equal(rows_LMR, plan.rank_load(case.load))
    assert np.array_equal(rows_LMR.sum(axis=2), case.load.tokens_MLER.sum(axis=(2, 3)).T)
    assert all(size >= 0 for layer in works for ranks in layer for work in ranks for size in work.sizes)
    every = [work for layer in works for ranks in layer for work in ranks]
    assert sum(len(work.flash) for work in every) == plan.stages[Stage.UPDATE].num_copies
    assert sum(sum(work.served) for work in every) == plan.stages[Stage.UPDATE].num_copies


def test_balanced_rows_differ_by_one_and_sum_to_the_load(case):
    works = balanced_works(case.load, case.cluster)
    for layer, micro_batches in enumerate(works):
        for m, ranks in enumerate(micro_batches):
            rows = [work.num_rows for work in ranks]
            assert sum(rows) == case.load.tokens_MLER[m, layer].sum()
            assert max(rows) - min(rows) <= 1
            assert all(max(work.sizes) - min(work.sizes) <= 1 and len(work.sizes) == 4 for work in ranks)


def test_copies_of_neighbour_layers_move_and_none_is_forgotten():
    def work(flash, served):
        return RankWork(staying=(5,), flash=(1,) * flash, served=served)

    works = [
        [[work(1, ())], [work(2, (1, 2))]],
        [[work(0, (4,))], [work(3, (1,))]],
    ]  # [L][M][R]: order of time (0,0) (1,0) (0,1) (1,1)
    assert moves_of(works, 0, 0) == [Moves(ahead=0, behind=3, returned=0, added=(4,))]
    assert moves_of(works, 1, 0) == [Moves(ahead=2, behind=1, returned=2, added=(1, 2))]
    assert moves_of(works, 1, 1) == [Moves(ahead=1, behind=2, returned=1, added=())]
    every = [moves_of(works, layer, m)[0] for layer in range(2) for m in range(2)]
    assert sum(move.ahead for move in every) == sum(move.behind for move in every) == 6
    assert Moves(ahead=1, behind=2, returned=1, added=(3, 1)).num_bytes(10, 100) == 530


def test_cases_share_time_by_ranks_and_rows(case):
    wider = replace(case, model=replace(case.model, expert_ffn=2 * case.model.expert_ffn))
    assert 0 < case.round_s < wider.round_s


# --- contenders ---


@pytest.fixture
def free_copies(monkeypatch):
    for name in ("HOLD_US_PER_MB", "MOVE_US_PER_MB", "ADD_US_PER_MB"):
        monkeypatch.setattr(f"benchmarks.gpu.contenders.{name}", 0.0)


def test_plans_count_the_tiles_of_the_kernels():
    assert TILE_ROWS == grouped.BM


def test_a_few_rows_are_not_worth_a_copy(case):
    (ours,) = (one for one in contenders(case, SETTING) if one.name == EQUILIBRA)
    assert ours.copies_per_layer() == 0


@pytest.mark.usefixtures("free_copies")
def test_contenders_compute_the_same_rows_and_only_some_move_copies(case):
    every = {one.name: one for one in contenders(case, SETTING)}
    assert set(every) == set(NAMES)
    total = case.load.tokens_MLER.sum()
    for one in every.values():
        assert sum(work.num_rows for work in one.every_work()) == total
    assert every[EQUILIBRA].works is every[STILL_ONE].works is every[OTHER_PATH].works
    assert every[EQUILIBRA].path == "device"
    assert every[OTHER_PATH].path == "host"
    assert every[BALANCED].imbalance() == pytest.approx(1.0, abs=0.02)
    assert every[STATIC].imbalance() == pytest.approx(case.static_imbalance()["of_step"])
    assert every[EQUILIBRA].imbalance() < every[STATIC].imbalance()
    for name in (STATIC, EPLB, STILL_ONE, BALANCED):
        assert every[name].moves(0, 0) == [STILL] * 4
    online = every[ONLINE].moves(1, 1)
    assert [move.exposed for move in online] == [len(work.flash) for work in every[ONLINE].works[1][1]]
    assert any(move.exposed for move in online)
    assert any(move.ahead for move in every[EQUILIBRA].moves(0, 0) + every[EQUILIBRA].moves(1, 0))
    assert seconds_to_plan(every[ONLINE].planning, 0, 1) > 0
    one_path = {one.name for one in contenders(case, replace(SETTING, paths=("host",)))}
    assert one_path == set(NAMES) - {OTHER_PATH}


# --- replay ---


def small_replay():
    return Replay(TINY, Sizes(rows=20, staying=3, flash=2), device=CPU)


def test_a_rank_computes_all_its_rows_with_all_its_instances(monkeypatch):
    seen = []

    def watched(kind, rows, sizes, instances):
        seen.append((rows.shape, tuple(sizes), len(instances)))
        return replay_forward(kind, rows, sizes, instances)

    replay_forward = replay.forward
    monkeypatch.setattr(replay, "forward", watched)
    works = [RankWork(staying=(4, 0, 3), flash=(5,)), RankWork(staying=(7,), flash=())]
    runner = small_replay()
    times = runner.run(works, [STILL, STILL], None)
    assert seen == [((12, 16), (4, 0, 3, 5), 4), ((7, 16), (7,), 1)]
    assert all(time.forward_us > 0 and time.backward_us > 0 and time.late_us == 0 for time in times)
    assert any(float(part.gate_up.abs().sum()) > 0 for part in runner.gradients)
    assert float(runner.gradients[1].gate_up.abs().sum()) == 0  # no rows, no gradient


@pytest.mark.parametrize("path", ["device", "host"])
def test_copies_really_move_into_the_other_bank(path):
    runner = Replay(TINY, Sizes(rows=20, staying=3, flash=2, served=3), device=CPU)
    before = [bank.clone() for bank in runner.banks]
    runner.neighbour_copies.copy_(torch.tensor([[1.0], [10.0], [100.0]]).expand_as(runner.neighbour_copies))
    source = runner.host_source if path == "host" else runner.source
    work = RankWork(staying=(4,), flash=(3,))
    runner.run([work], [Moves(ahead=2, returned=1, added=(2, 1))], path)  # rank 0 computes with bank 0
    assert torch.equal(runner.banks[1][:2], source[:2])
    assert torch.equal(runner.banks[0], before[0])
    assert runner.host_copies[:, 0].tolist() == ([1.0, 0.0] if path == "host" else [0.0, 0.0])
    # through the host come those that two slots have room for, the first of them again
    sums = [1.0, 1.0, 0.0] if path == "host" else [11.0, 100.0, 0.0]
    assert torch.equal(runner.neighbour_homes, torch.tensor(sums)[:, None].expand_as(runner.neighbour_homes))
    runner.run([work], [Moves(exposed=1)], path)
    assert torch.equal(runner.banks[0][0], source[0])
    assert torch.equal(runner.banks[0][1], before[0][1])


def test_the_device_rests_as_long_as_the_last_rank_was_hot(monkeypatch):
    runner, rests = small_replay(), []
    monkeypatch.setattr(runner.clock, "let_host_ahead", rests.append)
    work = RankWork(staying=(4,), flash=())
    for took in (4000.0, 9e9, 100.0):
        monkeypatch.setattr(runner, "_times", lambda *_, took=took: RankTimes(0.0, took / 2, took / 2, 0.0))
        runner.run([work], [STILL], None)
    runner.run([work], [STILL], None, head_start_us=500.0)
    assert rests == [1500.0, 3000.0, 20_000.0, 2000.0]


def test_a_pass_ends_when_products_and_copies_have_ended(monkeypatch):
    told = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for name in ("forward", "backward"):
        original = getattr(replay, name)
        monkeypatch.setattr(replay, name, lambda *a, _f=original, _n=name, **k: told.append(_n) or _f(*a, **k))
    runner = small_replay()
    runner.side = Stream("side")
    work = RankWork(staying=(4,), flash=(3,))
    runner.run([work], [Moves(ahead=1, behind=1)], "device")
    both = ["side waits for main", "{}", "main waits for side"]
    assert told == [step.format(name) for name in ("forward", "backward") for step in both]
    told.clear()
    runner.run([work], [STILL], None)
    assert told == ["forward", "backward"]  # nothing to wait for


def test_a_copy_that_is_late_is_counted():
    runner = small_replay()
    start, there, computed, copied, back, computed_back, copied_back = 0.0, 1.0, 3.0, 4.5, 4.75, 9.0, 8.0
    times = runner._times(start, there, computed, copied, back, computed_back, copied_back)
    assert times == pytest.approx((1e6, 3.5e6, 4.25e6, 1.5e6))


def test_sizes_are_the_largest_of_all():
    works = [RankWork(staying=(4, 0, 3), flash=()), RankWork(staying=(1,), flash=(9, 1))]
    assert Sizes.of(works) == Sizes(rows=11, staying=3, flash=2)


def test_without_a_gpu_the_bench_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"no GPU.*--device cpu"):
        device_named(None)
    assert device_named("cpu") == CPU


# --- records, times and shares ---


def made_records(us_of_contender, *, repeats=2, plan_us=0.0):
    """Two ranks, two layers, one micro-batch; contender -> [repeat][layer][rank] of forward times."""
    parts = []
    for name, us in us_of_contender.items():
        for repeat in range(repeats):
            for layer in range(2):
                rows = np.zeros(2, FIELDS)
                rows["contender"], rows["repeat"], rows["layer"] = NAMES.index(name), repeat, layer
                rows["rank"], rows["forward_us"] = [0, 1], us[repeat][layer]
                rows["plan_us"] = plan_us if name == ONLINE else 0.0
                rows["rows"], rows["instances"] = 10, 2
                parts.append(rows)
    return np.concatenate(parts)


def test_a_layer_takes_as_long_as_its_slowest_rank():
    rows = made_records({ONLINE: [[[1, 3], [2, 2]], [[5, 1], [1, 1]]]}, plan_us=10.0)
    assert layer_times(rows).tolist() == [[13, 12], [15, 11]]
    rows["copy_us"], rows["backward_us"] = 1.0, 2.0
    assert layer_times(rows).tolist() == [[16, 15], [18, 14]]
    assert laws.measured_us(rows).tolist() == [6, 4.5]  # medians of ranks first: without planning (3, 2), (1.5, 1.5)
    with pytest.raises(InputError, match="missing"):
        layer_times(rows[2:])


def test_ratios_are_to_what_ran_around_a_rank():
    balanced = made_records({STATIC: [[[1, 3], [4, 4]], [[4, 4], [2, 2]], [[1, 3], [3, 3]]]}, repeats=3)  # drifts
    mine = made_records({EPLB: [[[2, 3], [4, 4]], [[4, 4], [2, 2]], [[2, 2], [3, 9]]]}, repeats=3)
    weights = np.array([16, 18]) / 6  # means of layers
    slowest = np.array([[1.5, 1], [1, 1], [1, 3]])
    assert relative_times(mine, balanced).tolist() == pytest.approx((slowest @ weights / weights.sum()).tolist())
    assert settled_ratio(mine, balanced) == 1  # slow by chance, in one repeat each
    with pytest.raises(InputError, match="missing"):
        settled_ratio(mine[2:], balanced[2:])


def test_ranks_far_away_do_not_count():
    far = 2 * NEIGHBOURS + 3
    rows = np.zeros(far, FIELDS)
    rows["rank"], rows["forward_us"] = np.arange(far), [1.0] * (NEIGHBOURS + 1) + [2.0] * (far - NEIGHBOURS - 1)
    mine = rows.copy()
    mine["forward_us"][0] = 1.5  # where balanced took 1; further on, and in the median of all, it takes 2
    assert settled_ratio(mine, rows) == pytest.approx(1.5)


def test_shares_are_to_what_ran_around_a_rank(case):
    still = [[[2, 4], [4, 4]], [[4, 8], [8, 8]]]
    us = dict.fromkeys(NAMES, still)
    us[BALANCED] = [[[3, 3], [3, 3]], [[6, 6], [6, 6]]]  # the clock halves between repeats
    us[STATIC] = [[[8, 1], [1, 8]], [[16, 1], [1, 16]]]
    us[EQUILIBRA] = [[[2, 5], [4, 4]], [[4, 9], [8, 8]]]
    every = contenders(case, SETTING)
    found = case_result(case, SETTING, Measured(contenders=every, rows=made_records(us)))
    assert found["share_of_balanced"][STILL_ONE] == spread([6 / 8, 12 / 16])
    assert found["share_of_balanced"][EQUILIBRA]["repeats"] == pytest.approx([6 / 9, 12 / 17])
    assert found["share_of_balanced"][BALANCED]["median"] == 1
    assert found["speedup_over_static"][STILL_ONE]["median"] == 2
    assert found["exposed_share"]["device"]["repeats"] == pytest.approx([9 / 8 - 1, 17 / 16 - 1])
    assert found["exposed_share"]["host"]["median"] == 0


def test_records_come_back_as_they_were(tmp_path):
    records = Records()
    rows = made_records({STATIC: [[[1, 3], [2, 2]], [[5, 1], [1, 1]]]})
    records.add("one", rows)
    records.add("two", rows[:2])
    records.add("one", rows[:4])
    save_records(records, tmp_path / "r.npz")
    found = load_records(tmp_path / "r.npz")
    assert found.cases == ["one", "two"]
    assert np.array_equal(found.rows, records.rows)
    assert len(found.of("one", STATIC)) == 4
    assert len(found.of("two")) == 2
    assert len(found.of("one", EPLB)) == 0
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(InputError, match="no records"):
        load_records(tmp_path / "bad.npz")


# --- what would be measured if times were rows: the control ---


class RowsAsTimes:
    """A device whose time is the rows of a rank, and a hundred per copy that is waited for."""

    def __init__(self, *_, **__):
        self.cuda, self.host_us, self.expert_bytes, self.gradient_bytes = False, 0.0, 10, 20

    def run(self, works, moves, path, *, head_start_us):
        return [
            RankTimes(100.0 * move.exposed, 1.0 * work.num_rows, 2.0 * work.num_rows, 0.0)
            for work, move in zip(works, moves, strict=True)
        ]


def test_with_rows_as_times_shares_are_those_of_the_plans(case, monkeypatch):
    monkeypatch.setattr(measure, "Replay", RowsAsTimes)
    monkeypatch.setattr(measure, "seconds_to_plan", lambda *_: 50e-6)
    found = measure.measure(case, contenders(case, SETTING), SETTING, device=CPU, seconds=None)
    assert len(found.rows) == len(NAMES) * 2 * 2 * 2 * 4  # contenders, layers, micro-batches, repeats, ranks
    result = case_result(case, SETTING, found)
    imbalance = {one["contender"]: one["imbalance"] for one in result["contenders"]}
    for name in (STATIC, EPLB, EQUILIBRA, STILL_ONE):
        expected = imbalance[BALANCED] / imbalance[name]
        assert result["share_of_balanced"][name]["median"] == pytest.approx(
            expected, rel=1e-2
        )  # balanced rows differ by one
    assert result["exposed_share"]["device"]["median"] == 0
    assert result["online"]["plan_us"] == pytest.approx(50)
    assert 100 <= result["online"]["copy_us"] <= 200  # ranks that hold a copy hold one or two
    alone = imbalance[BALANCED] / imbalance[ONLINE]
    assert result["share_of_balanced"][ONLINE]["high"] < alone  # planning and copies count


def test_a_case_without_time_has_whole_layers_and_says_so(case, monkeypatch):
    monkeypatch.setattr(measure, "Replay", RowsAsTimes)
    found = measure.measure(case, contenders(case, SETTING), SETTING, device=CPU, seconds=0.0)
    assert any("1 of 4 layers and micro-batches" in note for note in found.notes)
    assert layer_times(found.rows[found.rows["contender"] == 0]).shape == (2, 1)


def test_contenders_take_turns(case, monkeypatch):
    order = []

    class Watched(RowsAsTimes):
        def run(self, works, moves, path, *, head_start_us):
            order.append(path)
            return super().run(works, moves, path, head_start_us=head_start_us)

    monkeypatch.setattr(measure, "Replay", Watched)
    measure.measure(case, contenders(case, SETTING), SETTING, device=CPU, seconds=0.0)
    rounds = [order[i : i + len(NAMES)] for i in range(0, len(order), len(NAMES))]
    assert len(rounds) == 3 * 4  # one of three does not count; four ranks
    assert len({tuple(sorted(map(str, one))) for one in rounds}) == 1
    assert rounds[4] == [None, None, "device", None, "device", "host", None, None]  # the first that counts
    assert rounds[5] == [None, "device", None, "device", "host", None, None, None]
    assert rounds[8] == rounds[5]  # the next repeat starts one further


def test_the_commit_is_said_where_the_source_is_no_checkout(monkeypatch):
    monkeypatch.setattr(suite.shutil, "which", lambda _: None)
    monkeypatch.delenv("EQUILIBRA_COMMIT", raising=False)
    assert suite.environment()["commit"] == "unknown"
    monkeypatch.setenv("EQUILIBRA_COMMIT", "abc123")
    assert suite.environment()["commit"] == "abc123"


# --- laws and roofline ---


def law_records(case_name, hidden, ffn, laws_of, *, seed, ranks=8):
    """Records whose times are those of a law exactly."""
    forward, backward = laws_of
    generator = np.random.default_rng(seed)
    model = MoEModel(name="m", num_layers=1, hidden=hidden, expert_ffn=ffn, num_experts=64, top_k=6)
    rows = np.zeros(len(laws.NOTHING_MOVES) * ranks, FIELDS)
    rows["contender"] = np.repeat([NAMES.index(name) for name in laws.NOTHING_MOVES], ranks)
    rows["rank"] = np.tile(np.arange(ranks), len(laws.NOTHING_MOVES))
    rows["rows"], rows["instances"] = generator.integers(500, 60_000, rows.size), generator.integers(2, 12, rows.size)
    for row in rows:
        size = {"rows": float(row["rows"]), "instances": float(row["instances"])}
        row["forward_us"] = forward.time_us(model, **size, backward=False)
        row["backward_us"] = backward.time_us(model, **size, backward=True)
    about = {"case": case_name, "recording": case_name.split(",")[0], "model": f"{hidden}x{ffn}", "ranks": ranks,
             "hidden": hidden, "expert_ffn": ffn, "experts": 64, "top_k": 6}  # fmt: skip
    return about, rows


def test_calibration_recovers_a_law_and_predicts_cases_it_was_not_fitted_on():
    truth = (
        ExpertLaw(fixed_us=60.0, weight_gb_per_s=3000.0, row_gb_per_s=2500.0, tflops=650.0),
        ExpertLaw(fixed_us=90.0, weight_gb_per_s=1500.0, row_gb_per_s=2000.0, tflops=550.0),
    )
    records, cases = Records(), []
    names = [f"{recording}, m, EP {ranks}" for recording in ("a", "b") for ranks in (8, 16, 32)]
    for number, name in enumerate(names):
        for hidden, ffn in ((2048, 768), (4096, 1536)):
            about, rows = law_records(f"{name} {hidden}", hidden, ffn, truth, seed=number, ranks=int(name.split()[-1]))
            records.add(about["case"], rows)
            cases.append(about)
    fitted = laws.chosen_to_fit(cases)
    assert fitted == [f"a, m, EP {ranks} {hidden}" for ranks in (8, 32) for hidden in (2048, 4096)]
    table, measurements, note = laws.calibration(records, cases)
    assert all(row["largest_error"] < 0.02 for row in table)
    assert [row["case"] for row in table if row["fitted"] == "no"] == [
        c["case"] for c in cases if c["case"] not in fitted
    ]
    hardware = calibrate(measurements, hardware_named("h200"), name="x", source="y").hardware
    assert hardware.experts_forward.fixed_us == pytest.approx(60.0, rel=0.1)
    assert "On the 8 others" in note
    other = records.of("b, m, EP 16 2048")
    other["backward_us"] *= 1.5  # a machine that the law does not describe must show
    records.add("b, m, EP 16 2048", other)
    worse = {row["case"]: row for row in laws.calibration(records, cases)[0]}
    assert worse["b, m, EP 16 2048"]["mean_error"] > 0.1
    assert laws.calibration(records, cases[:1])[2] == "one case alone: nothing to compare a fit with"


def test_flop_and_bytes_of_passes():
    model = MoEModel(name="m", num_layers=1, hidden=64, expert_ffn=32, num_experts=4, top_k=1)
    assert pass_flop(64, 32, 10, backward=False) == 10 * 2 * model.expert_parameters
    assert pass_flop(64, 32, 10, backward=True) == 10 * 4 * model.expert_parameters
    assert pass_bytes(64, 32, 10, 3, backward=False) == 10 * row_bytes(model) + 3 * model.expert_bytes
    more = pass_bytes(64, 32, 10, 3, backward=True) - 20 * row_bytes(model) - 3 * model.expert_bytes
    assert more == 3 * 2 * model.expert_gradient_bytes


def test_a_pass_at_the_ceiling_reaches_all_of_it():
    about, rows = law_records(
        "a, m, EP 8", 64, 32, (ExpertLaw(fixed_us=1, weight_gb_per_s=0, row_gb_per_s=0, tflops=1),) * 2, seed=0
    )
    records = Records()
    flop = np.array([pass_flop(64, 32, float(row["rows"]), backward=False) for row in rows])
    rows["forward_us"], rows["backward_us"] = flop * 1e-6 / 100.0, flop * 1e-6 / 100.0 * 4
    records.add("a, m, EP 8", rows)
    ceilings = {"product_tflops": 100.0, "memory_gb_per_s": 1e9}
    forward, backward = roofline(records, [{**about, "contenders": []}], ceilings, value=2)
    assert forward["of_product"] == pytest.approx(1.0, rel=1e-5)
    assert forward["reached"] == pytest.approx(1.0, rel=1e-5)
    assert backward["of_product"] == pytest.approx(0.5, rel=1e-5)
    assert all(value > 0 for value in measured_ceilings(CPU, repeats=1).values())


@pytest.mark.parametrize(("path", "reached"), [("device", 0.5), ("host", 0.25)])
def test_copies_are_compared_with_the_link_they_take(path, reached):
    about, rows = law_records(
        "a, m, EP 8", 64, 32, (ExpertLaw(fixed_us=1, weight_gb_per_s=0, row_gb_per_s=0, tflops=1),) * 2, seed=0
    )
    online = rows[:3].copy()
    online["contender"], online["copies"], online["bytes"], online["copy_us"] = NAMES.index(ONLINE), 1, 1000, 1.0
    online[2]["copies"] = 0  # no weights came
    records = Records()
    records.add("a, m, EP 8", np.concatenate([rows, online]))
    case = {**about, "contenders": [{"contender": ONLINE, "path": path}]}
    ceilings = {"product_tflops": 100.0, "memory_gb_per_s": 4.0, "host_link_gb_per_s": 4.0}
    copies = roofline(records, [case], ceilings, value=2)[-1]
    assert copies["pass"] == f"copies, {path}"
    assert copies["reached"] == pytest.approx(reached)  # read and written, or passed once
