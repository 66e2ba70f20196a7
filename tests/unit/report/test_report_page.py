"""The page as a file: one, self-contained, safe, the same every time; its assets; the command."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tests.references.runs import ALL_PLANNERS, FULL, HOSTILE, SMALL, TINY, hostile_run, make_run

from equilibra.cli.main import main
from equilibra.core.errors import InputError
from equilibra.events.run import PlannerRecord, Run, load_run, save_run
from equilibra.events.schema import EVENT, Events
from equilibra.report.page import SCRIPTS, render, write_report

ASSETS = files("equilibra.report") / "assets"
DECISION = Path(__file__).resolve().parents[3] / "docs" / "decisions" / "0004-report-charts.md"


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


@pytest.fixture(scope="module")
def page(run) -> str:
    return render(run)


class Scripts(HTMLParser):
    """Script elements as a browser cuts them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: set[str] = set()
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "script":
            self.found.append((dict(attrs), ""))
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def test_charting_library_is_the_one_that_was_decided_on():
    digest = hashlib.sha256((ASSETS / "echarts.min.js").read_bytes()).hexdigest()
    assert digest in DECISION.read_text()
    assert "6.1.0" in DECISION.read_text()
    assert "Apache License" in (ASSETS / "echarts.LICENSE").read_text()
    assert "Apache ECharts" in (ASSETS / "echarts.NOTICE").read_text()


def test_page_holds_everything_and_refers_to_nothing(page):
    assert (
        re.findall(
            r"<script[^>]+src|<link[^>]+stylesheet|@import|url\(http", page.split('<script type="application/json"')[0]
        )
        == []
    )
    scripts = Scripts(page).found
    assert len(scripts) == len(SCRIPTS) + 1
    assert [body for attributes, body in scripts if "type" not in attributes] == [
        (ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS
    ]


def test_policy_names_the_hash_of_every_script(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    for attributes, body in Scripts(page).found:
        if "type" not in attributes:
            assert base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_hostile_names_cannot_leave_the_data(page):
    scripts = Scripts(render(hostile_run()))
    assert len(scripts.found) == len(SCRIPTS) + 1
    assert "img" not in scripts.tags
    data = next(body for attributes, body in scripts.found if attributes.get("type") == "application/json")
    assert "<" not in data
    about = json.loads(data)["about"]
    assert about["command"] == HOSTILE


def test_same_run_same_page(run, page):
    assert render(run) == page


def test_own_scripts_are_short_and_never_build_markup():
    for name in SCRIPTS[1:]:
        text = (ASSETS / name).read_text()
        assert len(text.splitlines()) < 300, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_planners_of_different_models_are_refused(run):
    other = make_run(TINY).planners["static"]
    with pytest.raises(InputError, match="one model and cluster"):
        render(Run(about={}, planners={"static": other, "equilibra": run.planners["equilibra"]}))
    with pytest.raises(InputError, match="no planner"):
        render(Run(about={}))


def test_write_replaces_only_when_asked(run, tmp_path):
    path = tmp_path / "report.html"
    write_report(run, path)
    with pytest.raises(InputError, match="exists"):
        write_report(run, path)
    write_report(run, path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def random_record(rng: np.random.Generator, loads_LME: np.ndarray, copies: int) -> PlannerRecord:
    """Loads and copies that no compressor can guess, at the size of the largest run we promise."""
    layers, batches, experts = loads_LME.shape
    count = layers * batches * copies
    blank = make_run(TINY, ("static",)).planners["static"]
    return replace(
        blank,
        rank_tokens_LMR=loads_LME.reshape(layers, batches, 64, -1).sum(axis=3).astype(np.int32),
        expert_tokens_LME=loads_LME,
        home_of_expert_LE=np.tile(np.arange(experts, dtype=np.int32) // 2, (layers, 1)),
        flash_first_of_problem=np.arange(layers * batches + 1, dtype=np.int64) * copies,
        flash_expert=rng.integers(0, experts, count, dtype=np.int32),
        flash_rank=rng.integers(0, 64, count, dtype=np.int32),
        flash_origin=rng.integers(0, 64, count, dtype=np.int32),
        flash_tokens=rng.integers(0, 8192, count, dtype=np.int32),
        standing_tokens_CM=np.zeros((0, batches), np.int32),
        layer_us_PLM=rng.random((3, layers, batches), np.float32),
        bound_LM=np.full((layers, batches), 1000),
        events=Events(rows=np.zeros(0, EVENT)),
    )


def test_full_size_stays_below_five_megabytes():
    rng = np.random.default_rng(0)
    layers, batches = FULL.layers, 32
    loads = [rng.gamma(4, 4000, (layers, batches, 128)).astype(np.int32) for _ in range(2)]
    planners = {
        name: random_record(rng, loads[name == "equilibra"], 0 if name == "static" else 24) for name in ALL_PLANNERS
    }
    text = render(Run(about={}, planners=planners))
    assert 3_000_000 < len(text.encode()) < 5_000_000


def test_command_writes_page_and_trace(run, tmp_path, capsys):
    folder = tmp_path / "run"
    about = {key: value for key, value in run.about.items() if key != "version"}  # run.json has a version of its own
    save_run(Run(about=about, planners=run.planners), folder)
    assert load_run(folder).about["command"] == run.about["command"]
    assert main(["report", str(folder), "--perfetto", str(tmp_path / "trace.json"), "--planner", "static"]) == 0
    assert not (tmp_path / "run.html").exists()  # only the trace was asked for
    assert main(["report", str(folder)]) == 0
    assert (tmp_path / "run.html").stat().st_size > 1_000_000
    assert main(["report", str(folder), "--output", str(tmp_path / "run.html")]) == 2
    assert main(["report", str(folder), "--output", str(tmp_path / "run.html"), "--overwrite"]) == 0
    assert main(["report", str(folder), "--planner", "static"]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_one_planner_is_enough():
    assert "Equilibra" in render(make_run(SMALL, ("equilibra",)))
