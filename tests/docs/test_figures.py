"""The figures of the README and of docs/results.md are those of the result files."""

import json
import re

import pytest
from tests.conftest import REPOSITORY

NUMBER = r"(\d+(?:\.\d+)?)"


def results(name: str) -> dict:
    return json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}.json").read_text())


def figures(page: str, pattern: str) -> list[float]:
    """Numbers that stand where the pattern has N."""
    found = re.search(pattern.replace("N", NUMBER), re.sub(r"\s+", " ", (REPOSITORY / page).read_text()))
    assert found, f"{page} does not say {pattern}"
    return [float(one) for one in found.groups()]


def planned(planner: str) -> list[float]:
    rows = results("planner")["sections"]["planners"]["rows"]
    kept = [row for row in rows if (row["trace"], row["tokens"], row["planner"]) == ("gpt-oss-20b", 8192, planner)]
    return [row["imbalance_mean"] for row in sorted(kept, key=lambda row: row["nodes"])]


def test_imbalance_of_the_readme():
    said = figures("README.md", r"static N / N / N; UltraEP's rule, the next best, N / N / N; \*\*Equilibra N / N / N")
    assert said == pytest.approx([*planned("static"), *planned("ultraep"), *planned("equilibra")], abs=6e-4)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_imbalance_of_the_results(nodes):
    row = rf"\| {nodes} nodes? x 8 \| N \| N \| N \| N \| N \| N \| \*\*N\*\*"
    order = ["static", "lpt", "eplb-oracle", "lplb", "llep", "ultraep", "equilibra"]
    at = [1, 2, 4].index(nodes)
    assert figures("docs/results.md", row) == pytest.approx([planned(name)[at] for name in order], abs=6e-4)


def test_a_step_is_planned_in_that_time():
    (row,) = results("planner")["sections"]["whole_step"]["rows"]
    said = figures("README.md", r"32 micro-batches, 128 experts, 32 ranks \| N s")
    assert said == pytest.approx([row["seconds"]], abs=0.05)
    said = figures("docs/results.md", r"\| N → N with even traffic")
    assert said == pytest.approx([row["imbalance_static"], row["imbalance_mean"]], abs=6e-3)


def test_expert_layers_on_the_gpu():
    rows = results("gpu")["sections"]["cases"]["rows"]
    ours = [100 * float(row["share_of_slowest_balanced"].split()[0]) for row in rows]
    static = [100 * float(row["static"].split()[0]) for row in rows]
    said = figures("README.md", "N–N % of the speed of even ranks; static N–N %")
    assert said == pytest.approx([min(ours), max(ours), min(static), max(static)], abs=0.51)
    said = figures("docs/results.md", r"N to N %, mean N; static placement N to N %")
    expected = [min(ours), max(ours), sum(ours) / len(ours), min(static), max(static)]
    assert said == pytest.approx(expected, abs=0.51)
    assert len(rows) == 24


def test_training_runs():
    runs = results("training")["runs"]
    first, last = (
        [run[key] for run in runs if run["planner"] == "equilibra"] for key in ("held_out_first", "held_out_last")
    )
    said = figures("README.md", "held-out reward N → N–N; imbalance N–N under static placement, N under")
    static = [run["imbalance_static"] for run in runs]
    assert said == pytest.approx([first[0], min(last), max(last), min(static), max(static), 1.0], abs=0.006)


def test_planning_and_moving():
    (row,) = (
        one
        for one in results("train")["sections"]["figures"]["rows"]
        if one["figure"].startswith("planning and moving")
    )
    said = figures("README.md", r"planning and moving, in a training step \| N–N %")
    assert said == pytest.approx([100 * float(row["equilibra"]), 100 * float(row["equilibra-moves"])], abs=0.05)


def test_the_simulated_step_is_the_same_on_both_pages():
    said = figures("README.md", "N× static, N % of perfectly balanced")
    assert said == figures("docs/results.md", r"equilibra [\d.]+ s Nx N%")


def test_every_row_of_the_readme_says_how_it_came_about():
    rows = [line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 6
    for row in rows:
        assert re.search(r"\| (measured|simulated), `[^`]+` \|$", row), row
