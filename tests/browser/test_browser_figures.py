"""What the page shows equals what the run holds, computed here from its arrays."""

import math
from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.load import imbalance
from equilibra.events.run import Run
from equilibra.report.figures import label_of
from equilibra.report.timeline import kind_totals


def metric_errors(opened, run: Run) -> list[str]:
    """Cells of the table of metrics that differ from the run."""
    rows = {row[0]: row[1:] for row in opened.table("#metrics")}
    keys = opened.page.evaluate("Format.order(Object.keys(Data.run.planners[0].metrics))")
    assert len(opened.heads("#metrics")) == len(keys) + 1
    return [
        f"{name} {key}: {shown} is not {record.metrics[key]}"
        for name, record in run.planners.items()
        for key, shown in zip(keys, rows[label_of(name)], strict=True)
        if not math.isclose(float(shown), record.metrics[key], rel_tol=1e-12, abs_tol=1e-12)
    ]


def test_metrics_are_those_of_the_run(opened, small):
    assert metric_errors(opened, small) == []
    record = small.planners["equilibra"]
    wrong = replace(record, metrics={**record.metrics, "step_time_s": record.metrics["step_time_s"] * 1.001})
    assert metric_errors(opened, Run(about={}, planners={**small.planners, "equilibra": wrong}))  # the check can fail


def test_answer_is_the_ratio_of_step_times(opened, small):
    static, ours = (small.planners[name].metrics["step_time_s"] for name in ("static", "equilibra"))
    sentence = opened.text("h1")
    assert f"would take {ours / static:.2f} of the time" in sentence
    assert f"{static / ours:.2f}× faster" in sentence


def expected_loads(tokens_LMR: np.ndarray, mode: str) -> np.ndarray:
    """[R, M] what the heat map shows."""
    if mode == "sum":
        total_MR = tokens_LMR.sum(axis=0)
        return (total_MR / total_MR.mean(axis=1, keepdims=True)).T
    ratio_LMR = tokens_LMR / tokens_LMR.mean(axis=2, keepdims=True)
    return (ratio_LMR.max(axis=0) if mode == "worst" else ratio_LMR[int(mode)]).T


@pytest.mark.parametrize("mode", ["worst", "sum", "2"])
def test_heat_maps_show_loads_over_the_mean(opened, small, mode):
    opened.choose("#heat-layer", mode)
    opened.unfold("#heat-table")
    for number, name in enumerate(("static", "equilibra")):
        shown = np.array(opened.table("#heat-table", number), np.float64)[:, 1:]
        expected = expected_loads(small.planners[name].rank_tokens_LMR, mode)
        np.testing.assert_allclose(shown, expected, rtol=1e-12)
        if mode == "2":
            assert not np.allclose(shown, expected_loads(small.planners[name].rank_tokens_LMR, "1"))


def test_heat_maps_share_one_colour_scale(opened, small):
    opened.choose("#heat-layer", "worst")
    largest = max(
        expected_loads(small.planners[name].rank_tokens_LMR, "worst").max() for name in ("static", "equilibra")
    )
    assert opened.text("#heat-scale").endswith(f"{largest:.2f} × the mean; the mark is 1")
    assert [len(opened.page.query_selector_all(f"#heat-{side} canvas")) for side in ("before", "after")] == [1, 1]


def test_layers_show_mean_imbalance(opened, small):
    opened.unfold("#layers-table")
    shown = np.array(opened.table("#layers-table"), np.float64)[:, 1:]
    expected = np.stack([imbalance(record.rank_tokens_LMR).mean(axis=1) for record in small.planners.values()], axis=1)
    np.testing.assert_allclose(shown, expected, atol=1e-6)


@pytest.mark.parametrize(("layer", "batch"), [(0, 0), (3, 2)])
def test_drill_down_shows_every_copy_and_instance(opened, small, layer, batch):
    opened.choose("#drill-layer", layer)
    opened.choose("#drill-batch", batch)
    record = small.planners["equilibra"]
    shown = opened.table("#copies-table")
    assert sorted(shown) == sorted(expected_copies(record, layer, batch))
    assert sorted(shown) != sorted(expected_copies(record, (layer + 1) % 4, batch))  # the check can fail
    opened.unfold("#drill-instances")
    for number, name in enumerate(("static", "equilibra")):
        tokens = np.zeros(8, np.int64)
        for rank, _, _, served in opened.table("#drill-instances", number):
            tokens[int(rank)] += int(served)
        np.testing.assert_array_equal(tokens, small.planners[name].rank_tokens_LMR[layer, batch])


def expected_copies(record, layer: int, batch: int) -> list[list[str]]:
    problem = layer * record.rank_tokens_LMR.shape[1] + batch
    flash = range(*record.flash_first_of_problem[problem : problem + 2])
    rows = [
        [record.flash_expert[f], record.flash_origin[f], record.flash_rank[f], record.flash_tokens[f], "flash"]
        for f in flash
    ]
    for c in np.flatnonzero(record.standing_layer == layer):
        expert = record.standing_expert[c]
        home = record.home_of_expert_LE[layer, expert]
        rows.append([expert, home, record.standing_rank[c], record.standing_tokens_CM[c, batch], "standing"])
    return [[str(value) for value in row] for row in rows]


def test_drill_down_says_when_micro_batches_are_not_the_same(opened, small):
    before, after = (small.planners[name].expert_tokens_LME for name in ("static", "equilibra"))
    assert not np.array_equal(before, after)
    assert "pack sequences differently" in opened.text("#drill-summary caption")


def test_drill_down_shows_imbalance_before_and_after(opened, small):
    opened.choose("#drill-layer", 2)
    opened.choose("#drill-batch", 1)
    for row, name in zip(opened.table("#drill-summary"), ("static", "equilibra"), strict=True):
        tokens = small.planners[name].rank_tokens_LMR[2, 1]
        assert float(row[1]) == pytest.approx(tokens.max() / tokens.mean(), rel=1e-12)
        assert int(row[2]) == tokens.max()
        assert int(row[4]) == small.planners[name].bound_LM[2, 1]
        assert [float(value) for value in row[6:]] == pytest.approx(small.planners[name].layer_us_PLM[:, 2, 1].tolist())


def test_timeline_has_the_events_and_what_is_hidden(opened, small):
    for name in ("equilibra", "ultraep"):
        opened.choose("#gantt-planner", name)
        opened.wait(f"document.querySelector('#hidden-note').textContent.startsWith({label_of(name)!r})")
        rows = small.planners[name].events.rows
        shown = [[int(row[1]), float(row[2])] for row in opened.table("#gantt-totals")]
        assert shown == [[entry["events"], pytest.approx(entry["us_per_rank"])] for entry in kind_totals(rows)]
        events = opened.page.evaluate("Gantt.view.events.map((e) => [e.rank, e.layer, e.start, e.end, e.hidden])")
        expected = np.stack([rows[key].astype(float) for key in ("rank", "layer", "start_us", "end_us")], axis=1)
        np.testing.assert_allclose(np.array(events)[:, :4], expected, atol=0.02)


def test_memory_and_bound_are_those_of_the_run(opened, small):
    opened.unfold("#memory-table")
    plans = [name for name in small.planners if name != "balanced"]
    assert [float(row[-1]) for row in opened.table("#memory-table")] == [
        pytest.approx(sum(small.planners[name].memory.values())) for name in plans
    ]
    for row, name in zip(opened.table("#bound-table"), plans, strict=True):
        record = small.planners[name]
        slowest = record.rank_tokens_LMR.max(axis=2).astype(np.int64)
        assert float(row[3]) == pytest.approx(slowest.sum() / record.bound_LM.sum() - 1, abs=1e-12)
        assert float(row[5]) == pytest.approx((slowest / record.bound_LM).max() - 1, abs=1e-12)
