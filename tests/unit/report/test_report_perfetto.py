"""The Chrome trace: what ui.perfetto.dev requires of one, and that it is the run's events."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from tests.references.runs import make_run

from equilibra.core.errors import InputError
from equilibra.events.run import Run
from equilibra.events.schema import EVENT, Events, Kind, Resource
from equilibra.report.timeline import write_perfetto


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


@pytest.fixture
def trace(run, tmp_path) -> dict:
    write_perfetto(run, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())


def test_every_event_is_complete_and_named(trace):
    named = defaultdict(set)
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert event["name"]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named["thread_name"]
        assert event["pid"] in {rank for rank, _ in named["process_name"]}
    assert trace["otherData"] == {"planner": "Equilibra", "kind": "simulated", "program": "equilibra"}


def test_events_are_those_of_the_run(run, trace):
    rows = run.planners["equilibra"].events.rows
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == rows.size
    np.testing.assert_allclose([event["ts"] for event in shown], rows["start_us"])
    np.testing.assert_allclose([event["ts"] + event["dur"] for event in shown], rows["end_us"])
    assert [event["pid"] for event in shown] == rows["rank"].tolist()
    assert [event["tid"] for event in shown] == rows["resource"].tolist()
    copies = Counter(event["cat"] for event in shown)["flash copy"]
    assert copies == (rows["kind"] == Kind.FLASH_COPY).sum() > 0
    first = next(event for event in shown if event["cat"] == "flash copy")
    assert set(first["args"]) >= {"expert", "peer", "bytes", "hidden_us"}


def test_spans_of_one_thread_do_not_cross(trace):
    """Perfetto drops spans of one track that overlap without one holding the other."""
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
        key = (event["pid"], event["tid"])
        if event["tid"] == Resource.COMPUTE:
            assert event["ts"] >= ends[key] - 1e-6
        ends[key] = max(ends[key], event["ts"] + event["dur"])


def test_planner_can_be_chosen(run, tmp_path):
    write_perfetto(run, tmp_path / "static.json", planner="static")
    assert json.loads((tmp_path / "static.json").read_text())["otherData"]["planner"] == "static placement"
    with pytest.raises(InputError, match="no planner 'other'"):
        write_perfetto(run, tmp_path / "other.json", planner="other")
    with pytest.raises(InputError, match="exists"):
        write_perfetto(run, tmp_path / "static.json", planner="static")
    write_perfetto(run, tmp_path / "static.json", planner="equilibra", overwrite=True)


def test_no_events_no_trace(run, tmp_path):
    record = replace(run.planners["equilibra"], events=Events(rows=np.zeros(0, EVENT)))
    with pytest.raises(InputError, match="no events"):
        write_perfetto(Run(about={}, planners={"equilibra": record}), tmp_path / "trace.json")
