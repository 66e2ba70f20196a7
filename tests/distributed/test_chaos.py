"""The training program survives what happens to it: a few runs of `benchmarks.chaos`, one of each kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.cases import Case, draw
from benchmarks.chaos.program import Ended
from benchmarks.chaos.verdict import Numbers, verdict

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = (40, 23, 25, 28, 43, 278)
"""of the series of seed 0"""


@pytest.mark.slow
def test_runs_end_in_time_and_go_on_to_the_same_numbers(tmp_path):
    cases = {number: draw(0, number) for number in RUNS}
    kinds = {(case.injection, case.stage) for case in cases.values()}
    assert {("stop", "checkpoint"), ("kill", "migrate"), ("full", "checkpoint")} <= kinds
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--seed", "0", "--only", *map(str, RUNS), "--work", str(tmp_path)],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, capture_output=True, text=True,
        check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "records-0.jsonl").read_text().splitlines()]
    assert {record["number"] for record in records} == set(RUNS)
    assert all(record["injected"] for record in records)
    assert [record["verdict"] for record in records if "same numbers" not in record["verdict"]] == []


def ended(code, text="", *, after_s=1.0, saved=1, first=1, leftovers=(), began=True):
    """A program as it may end: rank 0 saved, or began with, so many steps."""
    stages = [{"kind": "stage", "name": "checkpoint", "step": step} for step in range(saved)]
    notes = {0: [{"kind": "first", "step": first}, *stages, {"kind": "stage", "name": "rollout", "step": saved}]}
    notes = notes if began else {}
    return Ended(code=code, seconds=3.0, after_s=after_s, text=text, notes=notes, leftovers=list(leftovers))


KILLED = "equilibra: ExecuteError: rank 1 of 2 was killed by SIGKILL; continue with: ..."
SAME, OTHER = Numbers(("a",), {"model": "1"}), Numbers(("a",), {"model": "2"})


@pytest.mark.parametrize(
    ("first", "resumed", "numbers", "said"),
    [
        (ended(0), None, SAME, "finished, same numbers"),
        (ended(0), None, OTHER, "defect: other numbers"),
        (ended(1, KILLED), ended(0), SAME, "error, resumed, same numbers"),
        (ended(1, KILLED), ended(0), OTHER, "defect: other numbers"),
        (ended(1, KILLED, saved=0), ended(0, first=0), SAME, "error before a checkpoint, began again, same numbers"),
        (ended(1, KILLED, saved=2), ended(0, first=1), SAME, "defect: 2 steps were saved, --resume began after 1"),
        (ended(1, KILLED.replace("rank 1", "rank 0")), ended(0), SAME, "defect: the error does not name the cause"),
        (ended(1, KILLED, after_s=60.0), ended(0), SAME, "defect: ended 60.0 s after the injection"),
        (ended(None), ended(0), SAME, "defect: the run hung"),
        (
            ended(-15, began=False), ended(0, first=0), SAME,
            "stopped as told before a checkpoint, began again, same numbers",
        ),
        (ended(-15), ended(0), SAME, "defect: the run ended with -15"),
        (ended(1, "Traceback (most recent call last):"), ended(0), SAME, "defect: the run printed a traceback"),
        (ended(1, KILLED, leftovers=["process 7"]), ended(0), SAME, "defect: the run left process 7"),
        (ended(1, KILLED), ended(2), None, "defect: --resume ended with 2"),
    ],
)  # fmt: skip
def test_every_kind_of_defect_is_found(first, resumed, numbers, said):
    shape = draw(0, 25).shape
    case = Case(number=0, shape=shape, injection="kill", rank=1)
    assert shape.world == 2
    assert verdict(case, first, resumed, numbers, SAME) == said
