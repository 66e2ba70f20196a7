"""A deployment's page: self-contained, safe, and what it draws is what the answer says."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from tests.unit.plan.test_plan_deployment import asked

from equilibra.cost.decode import Context, lognormal_context
from equilibra.plan.deployment.answer import answer
from equilibra.report.deployment import render_deployment, write_deployment


@pytest.fixture(scope="module")
def said():
    return answer(asked("mixtral-8x22b", "h20", "l40s", objective="cost", context=Context(mean=730))).to_json()


class Elements(HTMLParser):
    """Tags with their attributes, and their balance."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(said):
    page = render_deployment(said)
    assert not re.search(r"<script|https?://|@import|url\(", page)
    style = page[page.index("<style>") + 7 : page.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page
    assert 'style="' not in page  # the policy would ignore it
    assert not Elements(page).open
    assert len(page) < 100_000
    assert page == render_deployment(said)


def test_boxes_are_the_timeline(said):
    boxes = [about for tag, about in Elements(render_deployment(said)).found
             if tag == "rect" and about["class"] != "idle" and about["height"] == "34"]  # fmt: skip
    busy = said["pipeline"]["busy"]
    assert len(boxes) == len(busy) == 4 * said["pipeline"]["layers_shown"] * said["disaggregated"]["micro_batches"]
    end = max(one[4] for one in busy)
    widths = sorted(float(box["width"]) for box in boxes)
    spans = sorted((one[4] - one[3]) / end * 874 for one in busy)
    assert widths == pytest.approx([span - 1 for span in spans], abs=0.11)
    assert max(float(box["x"]) + float(box["width"]) for box in boxes) <= 985


def test_the_page_says_what_the_answer_says(said):
    page = render_deployment(said)
    idle = f"{said['pipeline']['idle']['attention']:.0%}"
    rate = f"{said['disaggregated']['tokens_per_s']:,.0f}"
    pace = f"Pace: {said['bound']['pace']}"
    for text in (said["sentence"], rate, idle, pace, "Simulated", "Modelled, not measured"):
        assert text in page
    assert "answers a second" not in page
    tail = lognormal_context(prompt=0, median=2000, sigma=0.7)
    assert "answers a second" in render_deployment(answer(asked("qwen3-30b-a3b", context=tail)).to_json())


def test_pipelines_that_do_not_overlap_say_so(said):
    plan = said["disaggregated"]
    a, e, c, m = plan["t_a_us"], plan["t_e_us"], plan["t_c_us"], plan["micro_batches"]
    formula = a + e + 2 * c + max(a, e) * (m * said["layers"] - 1)
    for times, text in ((1.0, "which is"), (1.3, "of full overlap,")):
        page = render_deployment({**said, "pipeline": {**said["pipeline"], "iteration_us": times * formula}})
        assert text in page


def test_names_cannot_become_html(said):
    hostile = {**said, "model": "<script>alert(1)</script>", "law": "<b>&", "not_colocated": ["<img src=x>"]}
    page = render_deployment(hostile)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_files_are_replaced_only_when_asked(said, tmp_path):
    from equilibra.core.errors import InputError

    write_deployment(said, tmp_path / "d.html")
    with pytest.raises(InputError):
        write_deployment(said, tmp_path / "d.html")
    write_deployment(said, tmp_path / "d.html", overwrite=True)
