"""A run as plain lines: one per step and per evaluation, short and aligned. For files and for what is no terminal.

step  12/60  reward 0.412  kl 0.0012  entropy  1.31  imbalance 1.84 > 1.02  exposed  1.2%   12,345 tokens/s   3.1 s
held out     reward 0.437 after 20 steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from equilibra.core.atomic import cannot
from equilibra.rl.observe import Observer
from equilibra.train.metrics_file import History
from equilibra.train.run_folder import RunFolder

__all__ = ["LogFile", "PlainLog", "Screen", "Several", "step_line", "summary", "summary_table", "to_stream"]

# What a run came to: one table for people, one object for programs.


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


# Observers of the training program: several at once, and what a screen can do besides observing.
#
# World rank 0 tells what happens to one observer, a `Several`: the metrics file, TensorBoard, log.txt and a screen.


class Screen(Observer, Protocol):
    """What a user looks at."""

    def note(self, text: str) -> None:
        """Say something else."""

    def close(self) -> None:
        """Leave the terminal as it was; what is on it stays."""


class Several:
    """Tells all."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """In the order in which they are told."""
        self.observers = tuple(observers)

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """A stage begins, or is further."""
        for one in self.observers:
            one.stage(name, step=step, done=done, total=total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        for one in self.observers:
            one.step(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out problems were answered before this step."""
        for one in self.observers:
            one.evaluated(step, metrics)

    def close(self) -> None:
        """Close those that can be closed."""
        for one in self.observers:
            close = getattr(one, "close", None)
            if close is not None:
                close()


SLOW = ("start", "warm-up", "report")
"""stages that are told besides steps: nothing else is to be seen meanwhile"""
EXPLAINED = {"start": "start (loads libraries; the first time it also compiles, about a minute)"}
PARTS = 4
"""lines that a slow stage with known parts gets"""
COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("reward",), "reward {:.3f}"),
    (("kl",), "kl {:.4f}"),
    (("entropy",), "entropy {:5.2f}"),
    (("imbalance_static", "imbalance"), "imbalance {:.2f} > {:.2f}"),
    (("exposed",), "exposed {:5.1%}"),
    (("tokens_per_s",), "{:8,.0f} tokens/s"),
    (("seconds",), "{:5.1f} s"),
)
"""metrics of a column, and how it looks; a column is left out where one is missing"""


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """The line of a step."""
    parts = [_numbered(step, steps)]
    for names, form in COLUMNS:
        if all(name in metrics for name in names):
            parts.append(form.format(*(float(metrics[name]) for name in names)))
    if metrics.get("skipped_steps", 0.0) > 0:
        parts.append(f"{metrics['skipped_steps']:.0f} optimizer steps skipped: gradient not finite")
    return "  ".join(parts)


def _numbered(step: int, steps: int) -> str:
    return f"step {step + 1:>{max(len(str(steps)), 3)}}/{steps}"


class PlainLog:
    """Lines, handed to `write` without their ends."""

    def __init__(self, write: Callable[[str], None], *, steps: int) -> None:
        """`steps` that the run has in all."""
        self._write, self._steps = write, steps
        self._told: tuple[str, int] | None = None

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:  # noqa: ARG002
        """A line for stages that take long, and for each quarter of them."""
        told = (name, PARTS * done // total if total > 0 else 0)
        if name in SLOW and told != self._told:
            self._write(f"{name} {done}/{total}" if total > 0 else EXPLAINED.get(name, name))
        self._told = told

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of figures."""
        self._write(step_line(step, self._steps, metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of the reward on held-out problems."""
        reward = metrics.get("reward_held_out")
        if reward is not None:
            width = len(_numbered(0, self._steps))
            self._write(f"{'held out':<{width}}  reward {reward:.3f} after {step} steps")

    def note(self, text: str) -> None:
        """The text."""
        self._write(text)

    def close(self) -> None:
        """Nothing."""


class LogFile:
    """Appends lines to a file, each one at once."""

    def __init__(self, path: Path) -> None:
        """Nothing is written yet."""
        self.path = path

    def __call__(self, line: str) -> None:
        """Append a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise cannot("write", self.path, error) from error


def to_stream(stream: TextIO) -> Callable[[str], None]:
    """Writes lines to a stream, each one at once."""
    return lambda line: print(line, file=stream, flush=True)
