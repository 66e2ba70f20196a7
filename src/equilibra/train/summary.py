"""What a run came to: one table for people, one object for programs."""

from __future__ import annotations

import math
from typing import Any

from equilibra.train.history import History
from equilibra.train.run_folder import RunFolder

__all__ = ["summary", "summary_table"]

TRENDS = (
    ("reward", "reward", "{:.3f}"),
    ("imbalance, static", "imbalance_static", "{:.2f}"),
    ("imbalance, now", "imbalance", "{:.2f}"),
    ("tokens per second", "tokens_per_s", "{:,.0f}"),
    ("seconds per step", "seconds", "{:.2f}"),
)
"""what is shown of the first and the last step: words, metric, how it looks"""
MISSING = "-"


def summary(history: History, folder: RunFolder, *, steps: int, stopped: bool, report: str | None) -> dict[str, Any]:
    """The last metrics and where everything is; what is not known is null."""
    held_out = history.held_out()
    last = history.steps[max(history.steps)] if history.steps else {}
    return {
        "folder": str(folder.path),
        "steps": max(history.steps, default=-1) + 1,
        "steps_asked": steps,
        "stopped": stopped,
        "metrics": {name: value if math.isfinite(value) else None for name, value in last.items()},
        "reward_held_out_first": held_out[0] if held_out else None,
        "reward_held_out_last": held_out[-1] if held_out else None,
        "config": str(folder.config),
        "metrics_file": str(folder.metrics),
        "log": str(folder.log),
        "tensorboard": str(folder.tensorboard),
        "checkpoints": str(folder.checkpoints),
        "report": report,
    }


def summary_table(history: History) -> str:
    """First and last, and where the time of the last step went."""
    rows = [("held-out reward", *_ends(history.held_out(), "{:.3f}"))]
    rows += [(words, *_ends(history.series(name), form)) for words, name, form in TRENDS]
    prefix = "seconds_"
    stages = sorted({name for row in history.steps.values() for name in row if name.startswith(prefix)}, key=_order)
    rows += [(f"  {name.removeprefix(prefix)}", *_ends(history.series(name), "{:.2f}")) for name in stages]
    lines = [f"{'':20}{'first':>10}{'last':>10}"]
    return "\n".join(lines + [f"{words:20}{first:>10}{last:>10}" for words, first, last in rows])


def _order(name: str) -> tuple[int, str]:
    order = ("rollout", "reward", "plan", "logprob", "advantages", "update", "weights", "checkpoint")
    stage = name.removeprefix("seconds_")
    return (order.index(stage) if stage in order else len(order), stage)


def _ends(series: list[float], form: str) -> tuple[str, str]:
    return (form.format(series[0]), form.format(series[-1])) if series else (MISSING, MISSING)
