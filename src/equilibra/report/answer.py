"""The answer, in one sentence and a few figures: what the page opens with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibra.events.run import PlannerRecord, Run
from equilibra.report.figures import finite
from equilibra.report.names import PREDICTED, chosen_pair, label_of, predictions_in
from equilibra.report.training import training, training_facts, training_sentence

__all__ = ["answer"]


def answer(run: Run) -> dict[str, Any]:
    """{sentence, facts: [{value, label}]}: of the pair that the page compares, or of the only planner there is.

    Of a training run they are about the run, and {step} is the sentence about its last step.
    """
    of_step = _answer_of_step(run)
    curves = training(run)
    if curves is None:
        return of_step
    return {"sentence": training_sentence(curves), "facts": training_facts(curves), "step": of_step["sentence"]}


def _answer_of_step(run: Run) -> dict[str, Any]:
    before, after = chosen_pair(run.planners)
    if after is None:
        return {"sentence": "This run has no plan to show.", "facts": []}
    record, baseline = run.planners[after], run.planners[before] if before is not None else None
    if before is not None and before in predictions_in(run):
        return {
            "sentence": _measured_sentence(run, after, before),
            "facts": [
                fact for fact in _facts(record, baseline, before) if fact is not None and "time" not in fact["metric"]
            ],
        }
    predicted = run.about.get("kind") != "measured"
    return {
        "sentence": _sentence(after, before, record, baseline, predicted=predicted),
        "facts": [fact for fact in _facts(record, baseline, before) if fact is not None],
    }


def _measured_sentence(run: Run, after: str, before: str) -> str:
    """What was measured, and apart from it what is predicted: two predictions compare, a measurement does not."""
    step = _metric(run.planners[after], "step_time_s")
    same = _metric(run.planners.get(PREDICTED), "step_time_s")
    other = _metric(run.planners[before], "step_time_s")
    name = _capital(label_of(after))
    took = f"{name}: this run has no step time." if step is None else f"{name} took {_seconds(step)} for the step."
    ratio = _ratio(same, other)
    if before == PREDICTED or ratio is None:
        return took if same is None else f"{took} The cost model predicts {_seconds(same)} for log-prob and update."
    if abs(ratio - 1) < 0.005:
        gain = f"as long as {label_of(before)}"
    else:
        gain = f"{ratio:.2f} of the time of {label_of(before)}, {_speed(ratio)}"
    return (
        f"{took} For log-prob and update the cost model, at the rates of this step, predicts {gain}, were every rank "
        "on a processor of its own."
    )


def _sentence(
    after: str, before: str | None, record: PlannerRecord, baseline: PlannerRecord | None, *, predicted: bool
) -> str:
    name = _capital(label_of(after))
    step = _metric(record, "step_time_s")
    ratio = _ratio(step, _metric(baseline, "step_time_s"))
    if step is None:
        return f"{name}: this run has no step time."
    if ratio is None or before is None:
        return f"{name} {'would take' if predicted else 'took'} {_seconds(step)} for the step{_share(record)}."
    verb = "would take" if predicted else "took"
    if abs(ratio - 1) < 0.005:
        return f"{name} {verb} as long as {label_of(before)}: there is nothing to gain here{_share(record)}."
    return f"{name} {verb} {ratio:.2f} of the time of {label_of(before)}: {_speed(ratio)}{_share(record)}."


def _speed(ratio: float) -> str:
    return f"a {1 / ratio:.2f}× faster step" if ratio <= 1 else f"a {ratio:.2f}× slower step"


def _capital(name: str) -> str:
    return name[0].upper() + name[1:] if name else name


def _share(record: PlannerRecord) -> str:
    share = _metric(record, "share_of_balanced")
    return "" if share is None else f", {share * 100:.1f}\u00a0% of the speed of a perfectly balanced one"


def _facts(record: PlannerRecord, baseline: PlannerRecord | None, before: str | None) -> list[dict[str, str] | None]:
    beside = "" if before is None else f"; {label_of(before)} " + "{}"
    return [
        _fact(record, baseline, "step_time_s", f"step time{beside}", _seconds),
        _fact(record, baseline, "imbalance_mean", f"imbalance, slowest rank over mean{beside}", "{:.3f}".format),
        _fact(record, None, "exposed_overhead_s", "overhead that is not hidden", _seconds),
        _fact(record, baseline, "peak_memory_bytes", f"peak memory of a rank{beside}", _bytes),
    ]


def _fact(
    record: PlannerRecord, baseline: PlannerRecord | None, key: str, label: str, show: Callable[[float], str]
) -> dict[str, str] | None:
    value, other = _metric(record, key), _metric(baseline, key)
    if value is None:
        return None
    label = label.format(show(other)) if other is not None else label.partition(";")[0]
    return {"metric": key, "value": show(value), "label": label}


def _metric(record: PlannerRecord | None, key: str) -> float | None:
    return None if record is None else finite(record.metrics.get(key))


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other and value > 0 and other > 0 else None


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}\u00a0{unit}" if abs(value) < 1000 else f"{value:.0f}\u00a0s"
    return "0\u00a0s"


def _bytes(value: float) -> str:
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}\u00a0{unit}"
    return f"{value:.0f}\u00a0B"
