"""Training runs to test the report with: the records of a synthetic step, and curves that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.references.runs import SMALL, make_run

from equilibra.events.run import PlannerRecord, Run

STAGES = ("rollout", "reward", "plan", "logprob", "advantages", "update", "weights")


def curves(num_steps: int = 12, *, every_evaluation: int = 4) -> dict[str, Any]:
    """Reward rises from 0.3, imbalance falls from 1.6, the first step takes 20 s and the others 2."""
    steps = list(range(num_steps))
    columns: dict[str, list[float | None]] = {
        "reward": [0.3 + 0.03 * step for step in steps],
        "kl": [0.001 + 0.0001 * step for step in steps],
        "entropy": [2.0 - 0.05 * step for step in steps],
        "loss": [0.01 * (-1) ** step for step in steps],
        "imbalance_static": [1.6 - 0.01 * step for step in steps],
        "imbalance": [1.004 - 0.0001 * step for step in steps],
        "exposed": [0.014] * num_steps,
        "mismatch_max": [4e-7] * num_steps,
        "tokens_per_s": [1800.0] * num_steps,
        "seconds": [20.0] + [2.0] * (num_steps - 1),
    }
    part = {"rollout": 0.4, "reward": 0.005, "plan": 0.2, "logprob": 0.3, "advantages": 0.01, "update": 0.9}
    for stage in STAGES:
        columns[f"seconds_{stage}"] = [part.get(stage, 0.1)] * num_steps
    columns["seconds_plan"][0] = 18.2
    evaluated = [*range(0, num_steps, every_evaluation), num_steps]
    return {
        "num_steps": num_steps, "every": 1, "steps": {"step": steps, **columns},
        "held_out": {"step": evaluated, "reward": [0.29 + 0.37 * step / num_steps for step in evaluated]},
    }  # fmt: skip


def timed(record: PlannerRecord, seconds: float) -> PlannerRecord:
    metrics = {key: value for key, value in record.metrics.items() if not key.startswith(("speedup", "share"))}
    return replace(record, metrics={**metrics, "step_time_s": seconds})


def training_run(training: object = None, **about: object) -> Run:
    """As `equilibra train` writes it: static placement predicted, Equilibra measured, and predicted."""
    step = make_run(SMALL, ("static", "equilibra"))
    ours = step.planners["equilibra"]
    planners = {
        "static": timed(step.planners["static"], 3.0),
        "equilibra": timed(ours, 2.5),
        "predicted": timed(ours, 2.0),
    }
    told = {
        **step.about, "kind": "measured", "warnings": [], "predicted": ["static", "predicted"], "step": 11,
        "settings": {"algorithm": "grpo"}, "training": curves() if training is None else training,
    }  # fmt: skip
    return Run(about={**told, **about}, planners=planners)
