"""The page itself: quiet, offline, usable by hand, keyboard and screen reader, in light, dark, on paper and small."""

from dataclasses import replace

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.references.runs import ALL_PLANNERS, FULL, HOSTILE, SMALL, TINY, Size, hostile_run, make_run

from equilibra.events.run import Run
from equilibra.events.schema import EVENT, Events


def chosen(opened) -> tuple[int, int]:
    return int(opened.page.input_value("#drill-layer")), int(opened.page.input_value("#drill-batch"))


def test_opens_from_disk_without_errors_or_network(opened, small):
    assert opened.ready == "yes"
    assert opened.problems == []
    assert opened.requests == [opened.path.as_uri()]
    assert opened.text("#kind") == "simulated"


def test_policy_forbids_network_and_foreign_scripts(show, small):
    opened = show(small)
    blocked = opened.page.evaluate(
        """async () => { let ran = false; window.mark = () => { ran = true; };
            const script = document.createElement("script");
            script.textContent = "window.mark()"; document.body.append(script);
            const sent = await fetch("http://127.0.0.1:9/").then(() => "sent", () => "blocked");
            return [ran, sent]; }"""
    )
    assert blocked == [False, "blocked"]
    assert any("Content Security Policy" in problem for problem in opened.problems)


def test_selectors_and_steppers_move_the_drill_down(opened, small):
    opened.choose("#drill-layer", 1)
    opened.choose("#drill-batch", 0)
    first = opened.table("#drill-summary")
    opened.page.click("[data-step=layer][data-by='1']")
    opened.settle()
    assert chosen(opened) == (2, 0)
    assert opened.table("#drill-summary") != first
    opened.page.click("[data-step=microBatch][data-by='-1']")
    opened.settle()
    assert chosen(opened)[1] == small.planners["static"].rank_tokens_LMR.shape[1] - 1


def test_click_on_a_cell_moves_the_drill_down(opened, small):
    opened.choose("#heat-layer", 3)
    opened.page.locator("#heat-before").scroll_into_view_if_needed()
    box = opened.page.locator("#heat-before").bounding_box()
    x, y = opened.page.evaluate("Theme.charts.get('heat-before').chart.convertToPixel({ seriesIndex: 0 }, [2, 6])")
    opened.page.mouse.click(box["x"] + x, box["y"] + y)
    opened.wait("State.values.rank === 6")
    assert chosen(opened) == (3, 2)
    tokens = small.planners["static"].rank_tokens_LMR[3, 2]
    assert f"static placement {tokens[6] / tokens.mean():.3f} of the mean in layer 3" in opened.text("#heat-live")


@pytest.mark.parametrize(
    ("chart", "point", "says"), [("heat-before", [2, 6], "× the mean"), ("gantt-chart", [50, 0], "Attention")]
)
def test_tooltips_show_under_the_policy(opened, chart, point, says):
    opened.page.evaluate(
        "(id) => document.getElementById(id).scrollIntoView({ behavior: 'instant', block: 'center' })", chart
    )
    box = opened.page.locator(f"#{chart}").bounding_box()
    x, y = opened.page.evaluate(
        "([id, point]) => Theme.charts.get(id).chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, point)",
        [chart, point],
    )
    opened.page.mouse.move(box["x"] + x, box["y"] + y)
    opened.wait(f"[...document.querySelectorAll('#{chart} .tip')].some((tip) => tip.innerText.includes('{says}'))")
    assert opened.problems == []


def test_arrow_keys_move_over_the_map_and_enter_goes_to_the_copies(opened, small):
    opened.choose("#heat-layer", 1)
    opened.page.focus("#heat-after")
    for _ in range(9):
        opened.page.keyboard.press("ArrowLeft")
        opened.page.keyboard.press("ArrowUp")
    assert opened.page.evaluate("[State.values.microBatch, State.values.rank]") == [0, 0]
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        opened.page.keyboard.press(key)
    opened.wait("document.querySelector('#drill-batch').value === '2'")
    assert chosen(opened) == (1, 2)
    assert opened.text("#heat-live").startswith("Rank 1, micro-batch 2:")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "drill"


def test_other_planners_can_be_compared(show, small):
    opened = show(small)
    opened.choose("#pick-after", "ultraep")
    opened.wait("document.querySelector('#heat-after-title').textContent.startsWith('UltraEP')")
    assert "UltraEP" in opened.text("#copies-note")


def test_columns_sort_both_ways(opened, small):
    button = opened.page.locator("#metrics thead button").nth(1)
    button.click()
    times = [float(row[1]) for row in opened.table("#metrics")]
    assert times == sorted(times)
    button.click()
    assert [float(row[1]) for row in opened.table("#metrics")] == sorted(times, reverse=True)
    assert opened.page.locator("#metrics th[aria-sort=descending]").count() == 1


def test_timeline_selectors_and_zoom(opened, small):
    few = opened.page.evaluate("Gantt.view.shown.length")
    opened.choose("#gantt-count", 4)
    assert opened.page.evaluate("Gantt.view.shown.length") > few
    opened.choose("#gantt-pass", "once")
    assert opened.page.evaluate("Gantt.view.shown.every((event) => event.kind === 'optimizer')")
    opened.page.click("[data-zoom=in]")
    zoomed = "(({ start, end }) => end - start)(Theme.charts.get('gantt-chart').chart.getOption().dataZoom[0])"
    assert opened.page.evaluate(zoomed) == pytest.approx(50)
    opened.page.click("[data-zoom=all]")
    assert opened.page.evaluate(zoomed) == pytest.approx(100)


def background(opened) -> str:
    return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light_follow_the_system_and_the_button(show, small):
    opened = show(small, scheme="dark")
    assert background(opened) == "rgb(15, 19, 23)"
    drawn = opened.page.evaluate("document.querySelector('#time-chart canvas').toDataURL()")
    opened.page.click("#theme")
    assert background(opened) == "rgb(255, 255, 255)"
    assert opened.page.evaluate("document.querySelector('#time-chart canvas').toDataURL()") != drawn
    assert background(show(small)) == "rgb(255, 255, 255)"
    assert opened.problems == []


def test_prints_light_without_controls(show, small):
    opened = show(small, scheme="dark")
    opened.page.emulate_media(media="print")
    opened.wait("document.documentElement.dataset.theme === 'light'")
    assert background(opened) == "rgb(255, 255, 255)"
    visible = [
        opened.page.is_visible(selector) for selector in ("nav", "#theme", ".controls", "#time-chart", "#metrics")
    ]
    assert visible == [False, False, False, True, True]
    assert opened.page.evaluate(
        "[...document.querySelectorAll('.chart canvas')]"
        ".every((canvas) => canvas.clientWidth <= canvas.closest('.chart').clientWidth + 1)"
    )
    assert opened.page.pdf(format="A4", print_background=True).startswith(b"%PDF")
    opened.page.emulate_media(media="screen")
    opened.wait("document.documentElement.dataset.theme === 'dark'")


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_accessible_to_axe(show, small, scheme):
    opened = show(small, scheme=scheme)
    for summary in opened.page.query_selector_all("summary"):
        summary.click()
    found = Axe().run(opened.page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in found] == []


def test_axe_would_object(show, small):
    opened = show(small)
    opened.page.evaluate(
        "document.querySelector('#heat-layer').closest('label').replaceWith(document.querySelector('#heat-layer'))"
    )
    assert "select-name" in {rule["id"] for rule in Axe().run(opened.page).response["violations"]}


def test_every_chart_has_a_name_and_a_table(opened, small):
    names = opened.page.evaluate("[...document.querySelectorAll('.chart')].map((c) => c.getAttribute('aria-label'))")
    assert len(names) == 10
    assert all(name and len(name) > 20 for name in names)
    sections = opened.page.evaluate(
        "[...document.querySelectorAll('main section')].filter((section) => section.querySelector('.chart'))"
        ".map((section) => Boolean(section.querySelector('table, details')))"
    )
    assert all(sections)


def test_hostile_names_stay_text(show):
    opened = show(hostile_run())
    assert opened.ready == "yes"
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.query_selector_all("img") == []
    assert opened.problems == []
    assert opened.requests == [opened.path.as_uri()]
    for selector in ("#kind", "#command", "#warnings p"):
        assert opened.page.text_content(selector) == HOSTILE


def test_browser_that_cannot_unpack_says_so(show, small):
    opened = show(small, before="delete globalThis.DecompressionStream")
    assert opened.ready == "partly"
    assert "DecompressionStream" in opened.text("#failure")
    assert not opened.page.is_visible("#load")
    assert opened.page.is_visible("#time-chart")


def without_extras() -> Run:
    """A measured run of a runtime: one planner, no events, few figures."""
    record = make_run(SMALL, ("equilibra",)).planners["equilibra"]
    bare = replace(record, metrics={"step_time_s": 2.5}, memory={}, events=Events(rows=np.zeros(0, EVENT)))
    return Run(about={"kind": "measured"}, planners={"equilibra": bare})


@pytest.mark.parametrize("make", [
    lambda: make_run(TINY), *(pytest.param(make, marks=pytest.mark.slow) for make in (
        without_extras, lambda: make_run(SMALL, ("static",)),
    )),
])  # fmt: skip
def test_small_and_bare_runs(show, make):
    opened = show(make())
    assert opened.ready == "yes"
    assert opened.problems == []


def test_measured_run_says_took(show):
    opened = show(without_extras())
    assert opened.text("#kind") == "measured"
    assert "took 2.5" in opened.text("h1")
    assert not opened.page.is_visible("#timeline")


def test_planners_with_other_micro_batches(show, small):
    record = small.planners["equilibra"]
    fewer = replace(
        record,
        rank_tokens_LMR=record.rank_tokens_LMR[:, :1], expert_tokens_LME=record.expert_tokens_LME[:, :1],
        flash_first_of_problem=np.zeros(5, np.int64), standing_tokens_CM=record.standing_tokens_CM[:, :1],
        layer_us_PLM=record.layer_us_PLM[:, :, :1], bound_LM=record.bound_LM[:, :1],
        **{f"flash_{name}": np.zeros(0, np.int32) for name in ("expert", "rank", "origin", "tokens")},
    )  # fmt: skip
    opened = show(Run(about=small.about, planners={"static": small.planners["static"], "equilibra": fewer}))
    opened.choose("#drill-batch", 2)
    assert "has no micro-batch 2" in opened.text("#copies-note")
    assert len(opened.table("#drill-summary")) == 1
    assert opened.problems == []


def test_narrow_screens_do_not_scroll_sideways(show, small):
    opened = show(small, width=400)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400


def test_512_ranks_stay_readable(show):
    many = Size(layers=2, nodes=64, ranks_per_node=8, experts=512, prompts=32, answers=8, tokens_per_rank=512)
    opened = show(make_run(many, ("static", "equilibra")))
    assert opened.problems == []
    assert opened.page.locator("#heat-before").bounding_box()["height"] >= 2 * 512
    opened.page.focus("#heat-before")
    opened.page.keyboard.press("ArrowDown")
    assert opened.ready == "yes"


@pytest.mark.slow
def test_full_size_stays_below_five_megabytes(show):
    run = make_run(FULL, ALL_PLANNERS)
    opened = show(run)
    assert opened.ready == "yes"
    assert opened.path.stat().st_size < 5_000_000
    layer, batch = 90, run.planners["equilibra"].rank_tokens_LMR.shape[1] - 1
    opened.choose("#drill-layer", layer)
    opened.choose("#drill-batch", batch)
    tokens = run.planners["equilibra"].rank_tokens_LMR[layer, batch]
    assert int(opened.table("#drill-summary")[-1][2]) == tokens.max()
