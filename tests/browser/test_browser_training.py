"""The section of a training run: its numbers, how it is used, and that nothing odd in a run breaks it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.references.runs import HOSTILE
from tests.unit.report.training_runs import curves, training_run

CHARTS = ("training-reward", "training-imbalance", "training-time", "training-kl", "training-entropy")


@pytest.fixture(scope="module")
def trained(show):
    """A training run, open once for all tests that choose what they look at."""
    return show(training_run())


def changed(**steps: object) -> dict:
    told = curves()
    return {**told, "steps": {**told["steps"], **steps}}


def series(opened, chart: str) -> dict[str, list]:
    """What a chart draws: [x, y] of every series, by name."""
    return opened.page.evaluate(
        """(id) => Object.fromEntries(Theme.charts.get(id).chart.getOption().series
            .map(({ name, data }) => [name, data.map((entry) => entry.value ?? entry)]))""",
        chart,
    )


def test_opens_quietly_with_the_section_first(trained):
    assert trained.ready == "yes"
    assert trained.problems == []
    assert trained.requests == [trained.path.as_uri()]
    sections = trained.page.evaluate("[...document.querySelectorAll('main section')].map((s) => s.id)")
    assert sections[:3] == ["", "training", "time"]
    assert trained.page.get_attribute("nav a", "href") == "#training"
    assert trained.text("#kind") == "training run"


def test_opens_with_what_was_learned_and_keeps_predictions_apart(trained):
    assert trained.text("h1").startswith("Held-out reward 0.29 → 0.66 in 12 steps; the slowest rank carried 1.00 times")
    facts = trained.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#facts b')].map((b) => [b.dataset.metric, b.innerText]))"
    )
    assert facts["reward_held_out"] == "0.660"
    assert facts["seconds"].replace("\u00a0", " ") == "2 s"
    assert "Equilibra took 2.5" in trained.text("#time-note")
    assert "predicts 0.67 of the time of static placement" in trained.text("#time-note")
    bars = trained.page.evaluate("Theme.charts.get('time-chart').chart.getOption().yAxis[0].data")
    assert bars == ["static placement, predicted", "Equilibra, predicted"]


def test_charts_draw_the_columns(trained):
    told = curves()
    steps = told["steps"]["step"]
    drawn = series(trained, "training-reward")
    assert drawn["training problems"] == [list(point) for point in zip(steps, told["steps"]["reward"], strict=True)]
    assert [point[1] for point in drawn["held-out problems"]] == told["held_out"]["reward"]
    drawn = series(trained, "training-imbalance")
    assert [point[1] for point in drawn["static placement (would have been)"]] == told["steps"]["imbalance_static"]
    assert [point[1] for point in drawn["Equilibra"]] == told["steps"]["imbalance"]
    for name in ("kl", "entropy"):
        assert [point[1] for point in series(trained, f"training-{name}")[name]] == told["steps"][name]


def test_stages_add_up_to_the_step(trained):
    told = curves()["steps"]
    drawn = series(trained, "training-time")
    assert list(drawn) == [
        "rollout",
        "plan",
        "logprob",
        "update",
        "weights",
        "other",
    ]  # reward, advantages: hardly any
    for index in range(12):
        assert sum(points[index][1] for points in drawn.values()) == pytest.approx(told["seconds"][index])
    assert [point[1] for point in drawn["update"]] == told["seconds_update"]


def test_a_step_that_compiles_does_not_flatten_the_others(trained):
    assert trained.text("#training-time-note").replace("\u00a0", " ") == "by stage; step 0 took 20.0 s, off the scale"
    top = trained.page.evaluate("Theme.charts.get('training-time').chart.getOption().yAxis[0].max")
    assert 2.0 < top < 3.0


def test_table_holds_every_step_and_evaluation(trained):
    trained.unfold("#training-table")
    heads, told = trained.heads("#training-table"), curves()
    rows = trained.table("#training-table")
    assert len(rows) == 13  # twelve steps, and the evaluation after the last
    for title, name in (
        ("Reward", "reward"),
        ("Imbalance, now", "imbalance"),
        ("Update", "seconds_update"),
        ("KL", "kl"),
    ):
        column = heads.index(title) if title != "Reward" else heads.index("Reward")
        assert [float(row[column]) for row in rows[:12]] == told["steps"][name]
    held_out = {int(row[0]): float(row[1]) for row in rows if row[1] is not None}
    assert held_out == dict(zip(told["held_out"]["step"], told["held_out"]["reward"], strict=True))


def test_keyboard_and_clicks_choose_a_step(trained):
    trained.page.focus("#training-step")
    trained.page.keyboard.press("Home")
    assert trained.text("#training-live").startswith("Step 0: reward 0.300; held-out reward before it 0.290; imbalance")
    for _ in range(3):
        trained.page.keyboard.press("ArrowRight")
    told = curves()["steps"]
    assert trained.text("#training-live").startswith(f"Step 3: reward {told['reward'][3]:.3f}; imbalance 1.004")
    assert trained.page.get_attribute("#training-step", "aria-valuetext") == "step 3"
    marks = "Theme.charts.get('{}').chart.getOption().series[0].markLine.data[0].xAxis"
    assert [trained.page.evaluate(marks.format(chart)) for chart in CHARTS] == [3] * 5
    trained.page.locator("#training-imbalance").scroll_into_view_if_needed()
    box = trained.page.locator("#training-imbalance").bounding_box()
    x, y = trained.page.evaluate(
        "Theme.charts.get('training-imbalance').chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [8.2, 1.2])"
    )
    trained.page.mouse.click(box["x"] + x, box["y"] + y)
    trained.wait("document.querySelector('#training-step').value === '8'")
    assert trained.text("#training-live").startswith("Step 8:")
    assert trained.problems == []


def test_tooltips_say_the_step(trained):
    trained.page.locator("#training-time").scroll_into_view_if_needed()
    box = trained.page.locator("#training-time").bounding_box()
    x, y = trained.page.evaluate(
        "Theme.charts.get('training-time').chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [5, 1])"
    )
    trained.page.mouse.move(box["x"] + x, box["y"] + y)
    trained.wait("[...document.querySelectorAll('#training-time .tip')].some((t) => t.innerText.includes('Step 5'))")
    assert "update 900" in trained.text("#training-time .tip")
    assert trained.problems == []


def test_every_chart_has_a_name(trained):
    for chart in CHARTS:
        assert trained.page.get_attribute(f"#{chart}", "role") == "img"
        assert len(trained.page.get_attribute(f"#{chart}", "aria-label")) > 30
    assert "mean 1.003; with static placement it would have been 1.545" in trained.page.get_attribute(
        "#training-imbalance", "aria-label"
    )


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "dark"),
        (400, "light"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(1280, "light"), (400, "dark")]),
    ],
)
def test_fits_every_width_and_colour(show, scheme, width):
    opened = show(training_run(), scheme=scheme, width=width)
    assert opened.problems == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    boxes = [opened.page.locator(f"#{chart}").bounding_box() for chart in CHARTS]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)  # side by side, or below each other
    picture = "document.querySelector('#training-time canvas').toDataURL()"
    before = opened.page.evaluate(picture)
    opened.page.click("#theme")
    assert opened.page.evaluate(picture) != before


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_accessible_to_axe(show, scheme):
    opened = show(training_run(), scheme=scheme)
    for summary in opened.page.query_selector_all("summary"):
        summary.click()
    found = Axe().run(opened.page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in found] == []


def test_prints_without_the_slider(show):
    opened = show(training_run(), scheme="dark")
    opened.page.emulate_media(media="print")
    opened.wait("document.documentElement.dataset.theme === 'light'")
    assert not opened.page.is_visible("#training-step")
    assert opened.page.is_visible("#training-reward")
    assert opened.page.pdf(format="A4", print_background=True).startswith(b"%PDF")


def only(**columns: list) -> Callable[[], dict]:
    length = max((len(column) for column in columns.values()), default=1)
    return lambda: {"steps": {"step": list(range(length)), **columns}}


def slowly(make: Callable[[], dict], visible: set[str]) -> Any:
    return pytest.param(make, visible, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make", "visible"),
    [
        (lambda: curves(1), set(CHARTS)),
        (only(), set()),
        (
            only(reward=[math.nan, 0.5, math.nan], seconds_update=[1.0, -2.0, 1e300]),
            {"training-reward", "training-time"},
        ),
        slowly(only(kl=[None, None, None]), set()),
        slowly(only(imbalance=[1.0, None, 1.5]), {"training-imbalance"}),
        slowly(only(seconds=[0.0, 0.0]), set()),
        slowly(lambda: {**curves(), "held_out": {"step": [5], "reward": [-4.0]}}, set(CHARTS)),
        slowly(lambda: {**only()(), "held_out": {"step": [0, 9], "reward": [0.1, 0.2]}}, {"training-reward"}),
        (lambda: changed(reward=[1e-300] * 12, imbalance=[None, 1.2] * 6, kl=[1e200, -1e200] * 6), set(CHARTS)),
    ],
)
def test_odd_runs_draw_what_there_is(show, make, visible):
    opened = show(training_run(make()))
    assert opened.ready == "yes"
    assert opened.problems == []
    assert not opened.page.is_visible("#failure")
    assert {chart for chart in CHARTS if opened.page.is_visible(f"#{chart}")} == visible
    opened.page.focus("#training-step")
    opened.page.keyboard.press("Home")
    assert opened.text("#training-live").startswith("Step 0: reward")
    assert "NaN" not in opened.text("#training")
    opened.unfold("#training-table")
    assert opened.problems == []


def test_hostile_names_stay_text(show):
    told = changed(**{f"seconds_{HOSTILE}": [0.3] * 12, "seconds_constructor": [0.2] * 12})
    opened = show(training_run(told, settings={"algorithm": HOSTILE}, step=HOSTILE))
    assert opened.ready == "yes"
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.query_selector_all("img") == []
    assert opened.problems == []
    assert HOSTILE in opened.page.text_content("#training-live")
    assert HOSTILE.upper() in opened.page.text_content("#training-lead")
    assert {HOSTILE, "constructor"} <= set(series(opened, "training-time"))


def test_two_thousand_steps_stay_quick(show):
    opened = show(training_run({**curves(2000, every_evaluation=20), "num_steps": 6000, "every": 3}))
    assert opened.problems == []
    assert "One step in 3 is shown" in opened.text("#training-lead")
    opened.page.focus("#training-step")
    took = opened.page.evaluate(
        """() => { const slider = document.querySelector('#training-step'); const start = performance.now();
            slider.value = '700'; slider.dispatchEvent(new Event('input')); return performance.now() - start; }"""
    )
    assert took < 3000
    assert opened.text("#training-live").startswith("Step 700:")
    opened.unfold("#training-table")
    assert len(opened.table("#training-table")) == 2001
    assert opened.path.stat().st_size < 3_000_000


def test_run_that_was_not_balanced_compares_nothing(show):
    run = training_run()
    planners = {"static": run.planners["static"], "predicted": run.planners["predicted"]}
    opened = show(type(run)(about={**run.about, "predicted": ["predicted"]}, planners=planners))
    assert opened.problems == []
    assert list(series(opened, "training-imbalance")) == ["static placement"]
    assert "would have" not in opened.text("#training")
