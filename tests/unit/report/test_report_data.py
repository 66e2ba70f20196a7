"""What goes into a page: packed arrays, loads that follow from copies, figures, the sentence, hidden time."""

import base64
import gzip
from dataclasses import replace

import numpy as np
import pytest
from tests.references.runs import ALL_PLANNERS, SMALL, make_run

from equilibra.events.run import Run
from equilibra.events.schema import Direction, Events, Kind, Resource, event_table
from equilibra.report.answer import answer
from equilibra.report.figures import chosen_pair, collect_detail, pack, packed_size, planner_figures, rank_tokens_of
from equilibra.report.timeline import hidden_us, kind_totals, shown_ranks, timeline


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(SMALL, ALL_PLANNERS)


def unpack(packed: dict) -> np.ndarray:
    dtype = np.dtype(f"<{packed['dtype']}")
    planes = np.frombuffer(gzip.decompress(base64.b64decode(packed["data"])), np.uint8)
    return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(packed["shape"])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 255], "u1"),
        ([0, 256], "u2"),
        ([70_000], "u4"),
        ([-1, 127], "i1"),
        ([-1, 40_000], "i4"),
        ([2**40], "f8"),
        ([], "u1"),
    ],
)
def test_pack_keeps_whole_numbers_in_the_smallest_type(values, dtype):
    packed = pack(np.array(values, np.int64))
    assert packed["dtype"] == dtype
    np.testing.assert_array_equal(unpack(packed), values)


def test_pack_is_the_same_every_time_and_keeps_shapes():
    array = np.random.default_rng(0).integers(0, 60_000, (3, 4, 5))
    assert pack(array) == pack(array.copy())
    np.testing.assert_array_equal(unpack(pack(array)), array)
    np.testing.assert_array_equal(unpack(pack(array / 7)), (array / 7).astype(np.float32))


def test_loads_of_ranks_follow_from_homes_and_copies(run):
    for name, record in run.planners.items():
        if name != "balanced":
            np.testing.assert_array_equal(rank_tokens_of(record), record.rank_tokens_LMR)


def test_loads_that_do_not_follow_are_stored(run):
    record = run.planners["equilibra"]
    other = replace(record, rank_tokens_LMR=record.rank_tokens_LMR[:, :, ::-1].copy())
    _, exact = collect_detail(run, budget_bytes=0)
    arrays, stored = collect_detail(Run(about={}, planners={"equilibra": other}), budget_bytes=0)
    assert "rank_tokens" not in exact["equilibra"]
    np.testing.assert_array_equal(unpack(arrays[stored["equilibra"]["rank_tokens"]]), other.rank_tokens_LMR)


def test_detail_keeps_the_pair_and_others_within_the_budget(run):
    arrays, keys = collect_detail(run, budget_bytes=0)
    assert list(keys) == ["static", "equilibra"]
    everything, all_keys = collect_detail(run, budget_bytes=10**9)
    assert list(all_keys) == [name for name in ALL_PLANNERS if name != "balanced"]
    some, _ = collect_detail(run, budget_bytes=(packed_size(arrays) + packed_size(everything)) // 2)
    assert packed_size(arrays) <= packed_size(some) < packed_size(everything)
    assert all_keys["static"]["expert_tokens"] == all_keys["ultraep"]["expert_tokens"]  # one schedule, stored once


def test_figures_of_the_ideal_have_no_gap(run):
    assert planner_figures("balanced", run.planners["balanced"])["gap"] is None
    record = run.planners["equilibra"]
    gap = planner_figures("equilibra", record)["gap"]
    assert gap["total"] == pytest.approx(record.rank_tokens_LMR.max(axis=2).sum() / record.bound_LM.sum() - 1)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (("static", "ultraep", "equilibra", "balanced"), ("static", "equilibra")),
        (("static", "balanced"), (None, "static")),
        (("lpt", "equilibra"), ("lpt", "equilibra")),
        (("static", "lpt", "mine"), ("static", "mine")),
        (("equilibra",), (None, "equilibra")),
        (("balanced",), (None, None)),
    ],
)
def test_pair_is_static_and_equilibra_or_the_nearest(names, pair):
    assert chosen_pair(names) == pair


def sentence(run: Run, kind: str = "simulated", **step_times: float) -> str:
    planners = {
        name: replace(run.planners[name], metrics={"step_time_s": time, "share_of_balanced": 0.982} if time else {})
        for name, time in step_times.items()
    }
    return answer(Run(about={"kind": kind}, planners=planners))["sentence"].replace("\u00a0", " ")


def test_answer_says_the_gain(run):
    assert sentence(run, static=10.0, equilibra=7.1) == (
        "Equilibra would take 0.71 of the time of static placement: a 1.41× faster step, "
        "98.2 % of the speed of a perfectly balanced one."
    )
    assert "took 0.71" in sentence(run, kind="measured", static=10.0, equilibra=7.1)
    assert "a 1.20× slower step" in sentence(run, static=10.0, equilibra=12.0)
    assert "nothing to gain" in sentence(run, static=10.0, equilibra=10.01)
    assert sentence(run, equilibra=0.0123).startswith("Equilibra would take 12.3 ms for the step")
    assert "no step time" in sentence(run, static=10.0, equilibra=0.0)


def test_answer_tolerates_what_is_missing(run):
    assert answer(Run(about={}, planners={"balanced": run.planners["balanced"]}))["facts"] == []
    bare = replace(run.planners["equilibra"], metrics={"imbalance_mean": 1.0})
    assert "no step time" in answer(Run(about={}, planners={"equilibra": bare}))["sentence"]


def spans(resource: Resource, kind: Kind, *times: tuple[float, float], rank: int = 0) -> np.ndarray:
    starts, ends = zip(*times, strict=True)
    return event_table(len(times), resource=resource, kind=kind, rank=rank, start_us=starts, end_us=ends)


def test_hidden_is_what_compute_covers():
    rows = Events.of(
        spans(Resource.COMPUTE, Kind.ATTENTION, (0, 10), (30, 40)),
        spans(Resource.COMPUTE, Kind.WAIT, (10, 30)),
        spans(Resource.COMPUTE, Kind.EXPERTS, (0, 100), rank=1),
        spans(Resource.COPY_ENGINE, Kind.FLASH_COPY, (5, 12), (9, 35), (12, 20), (38, 50), (0, 10)),
    ).rows
    copies = rows["kind"] == Kind.FLASH_COPY
    assert dict(zip(rows["start_us"][copies].tolist(), hidden_us(rows)[copies].tolist(), strict=True)) == {
        5.0: 5.0, 9.0: 6.0, 12.0: 0.0, 38.0: 2.0, 0.0: 10.0,
    }  # fmt: skip
    assert (hidden_us(rows)[~copies] == 0).all()
    total = {Kind(entry["kind"]): entry for entry in kind_totals(rows)}
    assert total[Kind.FLASH_COPY]["hidden_us_per_rank"] == pytest.approx(23 / 2)
    assert total[Kind.WAIT]["hidden_us_per_rank"] is None


def test_hidden_agrees_with_counting_microseconds(run):
    rng = np.random.default_rng(1)
    edges = np.sort(rng.choice(400, 40, replace=False)).reshape(-1, 2)
    starts, lengths = rng.integers(0, 380, 30), rng.integers(0, 60, 30)
    rows = Events.of(
        spans(Resource.COMPUTE, Kind.EXPERTS, *edges.tolist()),
        spans(
            Resource.NVLINK,
            Kind.DISPATCH,
            *zip(starts, starts + lengths, strict=True),
        ),
    ).rows
    busy = np.zeros(500, bool)
    for start, end in edges:
        busy[start:end] = True
    for row, hidden in zip(rows, hidden_us(rows), strict=True):
        if row["kind"] == Kind.DISPATCH:
            assert hidden == pytest.approx(busy[int(row["start_us"]) : int(row["end_us"])].sum())


def test_timeline_keeps_times_and_names(run):
    made = timeline(run, 8)
    assert made["ranks"] == list(range(8))
    assert (made["kinds"][Kind.DISPATCH], made["resources"][Resource.NVLINK]) == ("dispatch", "NVLink")
    packed, rows = made["planners"]["equilibra"], run.planners["equilibra"].events.rows
    start = np.cumsum(unpack(packed["arrays"]["start"]).astype(np.int64)) * packed["tick_us"]
    np.testing.assert_allclose(start, rows["start_us"], atol=packed["tick_us"])
    assert unpack(packed["arrays"]["direction"]).max() == Direction.BACKWARD


def test_of_many_ranks_the_busiest_and_the_idlest_are_shown(run):
    busy = np.full(64, 10.0)
    busy[[13, 50]] = 20.0, 5.0
    rows = event_table(64, kind=Kind.EXPERTS, rank=np.arange(64), end_us=busy)
    record = replace(run.planners["static"], events=Events.of(rows))
    ranks = shown_ranks(Run(about={}, planners={"static": record}), 64).tolist()
    assert {13, 50} <= set(ranks)
    assert len(ranks) == 8
