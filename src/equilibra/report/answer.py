"""What the page opens with: one sentence and a few figures, about a step or about a training run.

A training run has its curves in `about["training"]`:

    {"num_steps": 100, "every": 1, "steps": {"step": [0, ...], "reward": [0.29, ...], "seconds_update": [...], ...},
     "held_out": {"step": [0, 20, ...], "reward": [0.29, ...]}}

A run folder may come from anywhere: whatever is not a column of numbers is left out, and a value that is not a finite
number becomes null.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from equilibra.events.run import PlannerRecord, Run
from equilibra.report.figures import BASELINE, PREDICTED, chosen_pair, finite, label_of, predictions_in

METRICS = (
    "reward", "kl", "entropy", "loss", "imbalance_static", "imbalance", "exposed", "mismatch_max", "tokens_per_s",
    "seconds",
)  # fmt: skip
STAGE = "seconds_"
MAX_POINTS, MAX_STAGES, MAX_NAME = 4000, 16, 100
UPPER = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Curves = dict[str, Any]
"""{num_steps, every, planner, step, columns, stages, held_out: {step, reward}}"""
Column = list[float | None]


def answer(run: Run) -> dict[str, Any]:
    """{sentence, facts: [{metric, value, label}]} of the two planners that the page compares, or of the only one.

    For a training run they are about the run, and "step" is the sentence about its last step.
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
    facts = _facts(record, baseline, before)
    if before is not None and before in predictions_in(run):  # a measured time does not compare with a predicted one
        facts = [fact for fact in facts if "time" not in fact["metric"]]
        return {"sentence": _measured_sentence(run, after, before), "facts": facts}
    verb = "took" if run.about.get("kind") == "measured" else "would take"
    return {"sentence": _sentence(after, before, record, baseline, verb), "facts": facts}


def _measured_sentence(run: Run, after: str, before: str) -> str:
    """The measured step time, then the predicted gain: predictions compare only with predictions."""
    step = _metric(run.planners[after], "step_time_s")
    same = _metric(run.planners.get(PREDICTED), "step_time_s")
    name, ratio = _capital(label_of(after)), _ratio(same, _metric(run.planners[before], "step_time_s"))
    took = f"{name}: this run has no step time." if step is None else f"{name} took {_seconds(step)} for the step."
    if before == PREDICTED or ratio is None:
        return took if same is None else f"{took} The cost model predicts {_seconds(same)} for log-prob and update."
    gain = f"{ratio:.2f} of the time of {label_of(before)}, {_speed(ratio)}"
    if abs(ratio - 1) < 0.005:
        gain = f"as long as {label_of(before)}"
    return (
        f"{took} For log-prob and update the cost model, at the rates of this step, predicts {gain}, with every rank "
        "on its own processor."
    )


def _sentence(after: str, before: str | None, record: PlannerRecord, baseline: PlannerRecord | None, verb: str) -> str:
    name, step, share = _capital(label_of(after)), _metric(record, "step_time_s"), _metric(record, "share_of_balanced")
    ratio = _ratio(step, _metric(baseline, "step_time_s"))
    speed = "" if share is None else f", {share * 100:.1f}\u00a0% of the speed of a perfectly balanced one"
    if step is None:
        return f"{name}: this run has no step time."
    if ratio is None or before is None:
        return f"{name} {verb} {_seconds(step)} for the step{speed}."
    if abs(ratio - 1) < 0.005:
        return f"{name} {verb} as long as {label_of(before)}: there is nothing to gain here{speed}."
    return f"{name} {verb} {ratio:.2f} of the time of {label_of(before)}: {_speed(ratio)}{speed}."


def _speed(ratio: float) -> str:
    return f"a {1 / ratio:.2f}× faster step" if ratio <= 1 else f"a {ratio:.2f}× slower step"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _facts(record: PlannerRecord, baseline: PlannerRecord | None, before: str | None) -> list[dict[str, str]]:
    facts = []
    for key, label, show in FACTS:
        value, other = _metric(record, key), _metric(baseline, key)
        if value is not None:
            compared = before if other is not None and key != "exposed_overhead_s" else None
            against = "" if compared is None or other is None else f"; {label_of(compared)} {show(other)}"
            facts.append({"metric": key, "value": show(value), "label": f"{label}{against}"})
    return facts


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


FACTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step_time_s", "step time", _seconds),
    ("imbalance_mean", "imbalance, slowest rank over mean", "{:.3f}".format),
    ("exposed_overhead_s", "overhead that is not hidden", _seconds),
    ("peak_memory_bytes", "peak memory of a rank", _bytes),
)
"""metric, label and format of the figures about a step"""


def training(run: Run) -> Curves | None:
    """The training curves for the page; None if the run has no readable ones."""
    said = run.about.get("training")
    steps = said.get("steps") if isinstance(said, dict) else None
    step = _steps(steps)
    if not isinstance(said, dict) or not isinstance(steps, dict) or not step:
        return None
    stages = [name for name in steps if isinstance(name, str) and name.startswith(STAGE) and len(name) <= MAX_NAME]
    columns = {name: _column(steps.get(name), len(step)) for name in (*METRICS, *stages[:MAX_STAGES])}
    columns = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    points = _held_out(said.get("held_out"))
    return {
        "num_steps": _count(said.get("num_steps"), len(step)),
        "every": _count(said.get("every"), 1),
        "planner": chosen_pair(run.planners)[1],
        "step": step,
        "columns": columns,
        "stages": [name for name in columns if name.startswith(STAGE)],
        "held_out": {"step": [at for at, _ in points], "reward": [reward for _, reward in points]},
    }


def _held_out(said: object) -> list[tuple[int, float]]:
    """(step, reward) of evaluations with a finite reward."""
    if not isinstance(said, dict):
        return []
    steps = _steps(said)
    rewards = _column(said.get("reward"), len(steps))
    return [(at, reward) for at, reward in zip(steps, rewards, strict=False) if reward is not None]


def _steps(columns: object) -> list[int]:
    """The column "step" if it is a rising list of whole numbers, else nothing."""
    found = columns.get("step") if isinstance(columns, dict) else None
    if not isinstance(found, list) or len(found) > MAX_POINTS:
        return []
    whole = [at for at in found if isinstance(at, int) and not isinstance(at, bool) and 0 <= at < 2**53]
    return whole if whole == found and all(a < b for a, b in pairwise(whole)) else []


def _column(values: object, length: int) -> Column:
    return [finite(value) for value in values] if isinstance(values, list) and len(values) == length else []


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**53 else otherwise


def training_sentence(curves: Curves) -> str:
    """How much reward the run gained and how balanced its ranks were."""
    return _capital("; ".join(part for part in (_learned(curves), _balanced(curves)) if part)) + "."


def _learned(curves: Curves) -> str:
    held_out = curves["held_out"]
    rewards = held_out["reward"]
    if len(rewards) > 1:
        steps = held_out["step"][-1] - held_out["step"][0]
        return f"held-out reward {_two(rewards[0], rewards[-1])} in {_steps_of(steps)}"
    seen = _numbers(curves, "reward")
    if len(seen) > 1:
        return f"reward {_two(seen[0], seen[-1])} in {_steps_of(curves['num_steps'])}"
    return f"{_steps_of(curves['num_steps'])} of training"


def _balanced(curves: Curves) -> str:
    """Mean imbalances over the steps that have both."""
    columns, planner = curves["columns"], curves["planner"]
    both = [
        (before, now)
        for before, now in zip(columns.get("imbalance_static", []), columns.get("imbalance", []), strict=False)
        if before is not None and now is not None
    ]
    if not both:
        return ""
    before, now = fmean(one for one, _ in both), fmean(one for _, one in both)
    if planner == BASELINE:
        return f"the slowest rank carried {now:.2f} times the mean under static placement"
    against = f"against {before:.2f} under static placement"
    return f"the slowest rank carried {now:.2f} times the mean with {label_of(planner)}, {against}"


def training_facts(curves: Curves) -> list[dict[str, str]]:
    """Figures of the whole run, as far as it recorded them."""
    rewards, evaluated = curves["held_out"]["reward"], curves["held_out"]["step"]
    before, now = _numbers(curves, "imbalance_static"), _numbers(curves, "imbalance")
    static = f"; static placement {fmean(before):.3f}" if before and curves["planner"] != BASELINE else ""
    first = f"; {rewards[0]:.3f} at first" if len(rewards) > 1 else ""
    rate = _numbers(curves, "tokens_per_s")
    shown: list[tuple[str, list[float], Callable[[list[float]], str], str]] = [
        ("reward_held_out", rewards[-1:], lambda found: f"{found[0]:.3f}",
         f"held-out reward after {_steps_of(max(evaluated, default=0))}{first}"),
        ("imbalance", now, lambda found: f"{fmean(found):.3f}", f"imbalance, slowest rank over mean{static}"),
        ("seconds", _numbers(curves, "seconds"), lambda found: f"{median(found):.3g}\u00a0s",
         f"median step time on this machine{f'; {_whole(median(rate))} tokens/s' if rate else ''}"),
        ("exposed", _numbers(curves, "exposed"), lambda found: f"{100 * median(found):.1f}\u00a0%",
         "of a step is exposed overhead: waiting for planning, copies and migration"),
        ("mismatch_max", _numbers(curves, "mismatch_max"), lambda found: _power(max(found)),
         "largest difference between replayed log-probabilities and the rollout's"),
    ]  # fmt: skip
    return [{"metric": metric, "value": show(found), "label": label} for metric, found, show, label in shown if found]


def _numbers(curves: Curves, name: str) -> list[float]:
    return [value for value in curves["columns"].get(name, []) if value is not None]


def _two(first: float, last: float) -> str:
    digits = 3 if max(abs(first), abs(last)) < 0.1 else 2
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _steps_of(count: int) -> str:
    return f"{_whole(count)} step{'' if count == 1 else 's'}"


def _whole(number: float) -> str:
    return f"{number:,.0f}".replace(",", "\u202f")


def _power(value: float) -> str:
    if not value:
        return "0"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}\u00a0×\u00a010{str(int(power)).translate(UPPER)}"
