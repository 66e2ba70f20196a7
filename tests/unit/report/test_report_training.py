"""The part of a report that only training runs have: what is read and said, and that other pages hold none of it."""

import json
import math
import re
from importlib.resources import files

import pytest
from tests.references.runs import HOSTILE, SMALL, make_run
from tests.unit.report.training_runs import curves, timed, training_run

from equilibra.events.run import Run, load_run, save_run
from equilibra.report.answer import answer, training, training_facts, training_sentence
from equilibra.report.figures import chosen_pair, labels_of, predictions_in
from equilibra.report.page import MIXED, SCRIPTS, TRAINING_SCRIPT, render

ASSETS = files("equilibra.report") / "assets"


@pytest.fixture(scope="module")
def run() -> Run:
    return training_run()


def with_curves(run: Run, told: object) -> Run:
    return Run(about={**run.about, "training": told}, planners=run.planners)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="run">(.*?)</script>', page, re.DOTALL).group(1))


def test_columns_are_those_of_the_run(run):
    found, told = training(run), curves()
    assert found["step"] == told["steps"]["step"]
    assert found["columns"] == {name: column for name, column in told["steps"].items() if name != "step"}
    assert found["stages"] == [name for name in told["steps"] if name.startswith("seconds_")]
    assert found["held_out"] == told["held_out"]
    assert (found["num_steps"], found["planner"]) == (12, "equilibra")


def test_sentence_says_what_was_learned_and_evened(run):
    assert training_sentence(training(run)) == (
        "Held-out reward 0.29 → 0.66 in 12 steps; the slowest rank carried 1.00 times the mean with Equilibra, "
        "against 1.54 under static placement."
    )


def test_facts_are_of_the_whole_run(run):
    facts = {fact["metric"]: fact for fact in training_facts(training(run))}
    assert facts["reward_held_out"]["value"] == "0.660"
    assert facts["reward_held_out"]["label"] == "held-out reward after 12 steps; 0.290 at first"
    assert facts["imbalance"]["value"] == "1.003"
    assert facts["imbalance"]["label"].endswith("static placement 1.545")
    assert facts["seconds"]["value"] == "2\u00a0s"  # the median: the first step compiles
    assert facts["exposed"]["value"] == "1.4\u00a0%"
    assert facts["mismatch_max"]["value"] == "4.0\u00a0×\u00a010⁻⁷"


def test_sentence_about_the_step_keeps_measured_and_predicted_apart(run):
    said = answer(run)
    assert said["sentence"].startswith("Held-out reward")
    assert said["step"].replace("\u00a0", " ") == (
        "Equilibra took 2.5 s for the step. For log-prob and update the cost model, at the rates of this step, "
        "predicts 0.67 of the time of static placement, a 1.50× faster step, with every rank on its own processor."
    )


def test_without_curves_the_step_is_the_answer(run):
    about = {key: value for key, value in run.about.items() if key != "training"}
    said = answer(Run(about=about, planners=run.planners))
    assert said["sentence"].startswith("Equilibra took 2.5")
    assert "step_time_s" not in [fact["metric"] for fact in said["facts"]]  # one measured, one predicted
    only = Run(about=about, planners={name: run.planners[name] for name in ("equilibra", "predicted")})
    assert answer(only)["sentence"].replace("\u00a0", " ") == (
        "Equilibra took 2.5 s for the step. The cost model predicts 2 s for log-prob and update."
    )


def test_static_run_says_so(run):
    planners = {"static": run.planners["static"], "predicted": run.planners["predicted"]}
    static = Run(about={**run.about, "predicted": ["predicted"]}, planners=planners)
    assert training(static)["planner"] == "static"
    assert training_sentence(training(static)).endswith(
        "the slowest rank carried 1.00 times the mean under static placement."
    )
    assert labels_of(static) == {"static": "static placement, measured", "predicted": "static placement, predicted"}
    assert "Static placement took 3" in answer(static)["step"]


def test_names_say_measured_or_predicted_only_where_both_are(run):
    assert labels_of(run) == {
        "static": "static placement, predicted",
        "equilibra": "Equilibra, measured",
        "predicted": "Equilibra, predicted",
    }
    assert labels_of(make_run(SMALL, ("static", "equilibra"))) == {
        "static": "static placement", "equilibra": "Equilibra",
    }  # fmt: skip
    assert predictions_in(Run(about={"kind": "simulated", "predicted": ["static"]}, planners=run.planners)) == []
    assert chosen_pair(("static", "lplb", "predicted")) == ("static", "lplb")
    assert chosen_pair(("static", "predicted")) == ("predicted", "static")


def test_measured_times_do_not_stand_among_predicted_ones(run):
    data = data_of(render(run))
    metrics = {planner["name"]: planner["metrics"] for planner in data["planners"]}
    assert "step_time_s" not in metrics["equilibra"]
    assert metrics["equilibra"]["measured_step_time_s"] == 2.5
    assert (metrics["static"]["step_time_s"], metrics["predicted"]["step_time_s"]) == (3.0, 2.0)
    assert data["about"]["kind"] == MIXED
    both = {"static": run.planners["static"], "equilibra": run.planners["equilibra"]}
    measured = Run(about={"kind": "measured"}, planners={**both, "predicted": run.planners["predicted"]})
    figures = {planner["name"]: planner["metrics"] for planner in data_of(render(measured))["planners"]}
    assert figures["equilibra"]["step_time_s"] == 2.5  # beside another measured one it does
    assert "took 0.83" in answer(measured)["sentence"]


def test_page_holds_the_curves_once_and_its_own_script(run):
    page = render(run)
    data = data_of(page)
    assert data["training"] == training(run)
    assert "training" not in data["about"]
    assert page.count('id="training"') == 1
    assert (ASSETS / TRAINING_SCRIPT).read_text() in page
    assert render(run) == page


def test_other_pages_hold_nothing_of_it():
    for page in (render(make_run()), render(training_run({}))):
        assert 'id="training"' not in page
        assert "<!--" not in page.split('<script type="application/json"')[0]
        assert "training-" not in page.split('<script type="application/json"')[0]
        assert (ASSETS / TRAINING_SCRIPT).read_text() not in page
        assert page.count("<script") == len(SCRIPTS) + 1
        assert "training" not in data_of(page)


def test_script_is_short_and_never_builds_markup():
    text = (ASSETS / TRAINING_SCRIPT).read_text()
    assert len(text.splitlines()) < 300
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def changed(**steps: object) -> dict:
    told = curves()
    return {**told, "steps": {**told["steps"], **steps}}


@pytest.mark.parametrize(
    "told",
    [
        None, 3, [], "text", {}, {"steps": 4}, {"steps": {}}, {"steps": {"step": []}}, {"steps": {"step": "abc"}},
        changed(step=[0] * 12), changed(step=[0.5] * 12), changed(step=list(range(12))[::-1]),
        changed(step=[True] + [2] * 11),
        {"steps": {"step": list(range(100_000))}},
    ],
)  # fmt: skip
def test_what_is_no_curve_is_no_training(run, told):
    odd = with_curves(run, told)
    assert training(odd) is None
    assert answer(odd)["sentence"].startswith("Equilibra took")
    assert "training" not in data_of(render(odd))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (changed(reward=[math.nan] * 12, imbalance=None), "Held-out reward 0.29 → 0.66 in 12 steps."),
        (changed(imbalance=["1"] * 12), "Held-out reward 0.29 → 0.66 in 12 steps."),
        (
            {**curves(), "held_out": {"step": [0], "reward": [0.5, 0.6]}},
            "Reward 0.30 → 0.63 in 12 steps; the slowest rank",
        ),
        ({**curves(), "held_out": "none"}, "Reward 0.30 → 0.63 in 12 steps; the slowest rank"),
        ({**curves(), "num_steps": -3, "held_out": None}, "Reward 0.30 → 0.63 in 12 steps"),
        ({"steps": {"step": [7]}}, "1 step of training."),
        ({"steps": {"step": [7], "reward": [0.5]}, "num_steps": 8}, "8 steps of training."),
        (
            {**curves(), "held_out": {"step": [0, 4], "reward": [0.01, 0.02]}},
            "Held-out reward 0.010 → 0.020 in 4 steps",
        ),
    ],
)
def test_odd_columns_are_left_out(run, told, says):
    odd = with_curves(run, told)
    assert answer(odd)["sentence"].startswith(says)
    found = data_of(render(odd))["training"]
    assert all(len(column) == len(found["step"]) for column in found["columns"].values())
    assert all(value is None or math.isfinite(value) for column in found["columns"].values() for value in column)


def test_names_of_stages_are_bounded_and_stay_text(run):
    many = {f"seconds_{number}": [0.1] * 12 for number in range(100)}
    assert len(training(with_curves(run, changed(**many)))["stages"]) == 16
    page = render(with_curves(run, changed(**{f"seconds_{HOSTILE}": [0.2] * 12})))
    assert page.count("<script") == render(run).count("<script")
    assert f"seconds_{HOSTILE}" in data_of(page)["training"]["stages"]


def test_training_survives_the_run_folder(run, tmp_path):
    about = {key: value for key, value in run.about.items() if key != "version"}
    save_run(Run(about=about, planners=run.planners), tmp_path / "step.run")
    assert training(load_run(tmp_path / "step.run")) == training(run)


def test_equal_predictions_say_there_is_nothing_to_gain(run):
    planners = {**run.planners, "predicted": timed(run.planners["predicted"], 3.0)}
    assert "predicts as long as static placement" in answer(Run(about=run.about, planners=planners))["step"]
