"""A run in text: one line per step and evaluation for files and pipes, and the summary at the end.

step  12/60  reward 0.412  kl 0.0012  entropy  1.31  imbalance 1.84 > 1.02  exposed  1.2%   12,345 tokens/s   3.1 s
held out     reward 0.437 after 20 steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from equilibra.core.atomic import cannot
from equilibra.rl.observe import Observer
from equilibra.train.metrics_file import STAGE, History
from equilibra.train.run_folder import RunFolder

__all__ = ["LogFile", "PlainLog", "Several", "step_line", "summary", "summary_table", "to_stream"]

SLOW = ("start", "warm-up", "report")
"""stages that get their own lines, because no step ends meanwhile"""
STARTING = "loads libraries; the first time it also compiles, about a minute"
EXPLAINED = {"start": f"start ({STARTING})"}
PARTS = 4
"""lines of a slow stage whose progress is known"""
COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("reward",), "reward {:.3f}"),
    (("kl",), "kl {:.4f}"),
    (("entropy",), "entropy {:5.2f}"),
    (("imbalance_static", "imbalance"), "imbalance {:.2f} > {:.2f}"),
    (("exposed",), "exposed {:5.1%}"),
    (("tokens_per_s",), "{:8,.0f} tokens/s"),
    (("seconds",), "{:5.1f} s"),
)
"""metrics of a column and its format; a column without all its metrics is left out"""
TRENDS = (
    ("reward", "reward", "{:.3f}"),
    ("imbalance, static", "imbalance_static", "{:.2f}"),
    ("imbalance, now", "imbalance", "{:.2f}"),
    ("tokens per second", "tokens_per_s", "{:,.0f}"),
    ("seconds per step", "seconds", "{:.2f}"),
)
"""rows of the summary: label, metric, format"""
ORDER = ("rollout", "reward", "plan", "logprob", "advantages", "update", "weights", "checkpoint")


class Several(Observer):
    """Passes everything on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        for one in self.observers:
            one.stage(name, step=step, done=done, total=total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for one in self.observers:
            one.step(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for one in self.observers:
            one.evaluated(step, metrics)

    def note(self, text: str) -> None:
        for one in self.observers:
            one.note(text)

    def close(self) -> None:
        for one in self.observers:
            one.close()


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """The line of a step, as in the module's example."""
    parts = [_numbered(step, steps)]
    for names, form in COLUMNS:
        if all(name in metrics for name in names):
            parts.append(form.format(*(float(metrics[name]) for name in names)))
    if metrics.get("skipped_steps", 0.0) > 0:
        parts.append(f"{metrics['skipped_steps']:.0f} optimizer steps skipped: gradient not finite")
    return "  ".join(parts)


def _numbered(step: int, steps: int) -> str:
    return f"step {step + 1:>{max(len(str(steps)), 3)}}/{steps}"


class PlainLog(Observer):
    """A screen of plain lines, passed to `write` without line ends."""

    def __init__(self, write: Callable[[str], None], *, steps: int) -> None:
        self._write, self._steps = write, steps
        self._told: tuple[str, int] | None = None

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:  # noqa: ARG002
        told = (name, PARTS * done // total if total > 0 else 0)
        if name in SLOW and told != self._told:
            self._write(f"{name} {done}/{total}" if total > 0 else EXPLAINED.get(name, name))
        self._told = told

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step_line(step, self._steps, metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("reward_held_out")
        if reward is not None:
            width = len(_numbered(0, self._steps))
            self._write(f"{'held out':<{width}}  reward {reward:.3f} after {step} steps")

    def note(self, text: str) -> None:
        self._write(text)


class LogFile:
    """Appends each line to a file at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise cannot("write", self.path, error) from error


def to_stream(stream: TextIO) -> Callable[[str], None]:
    """A function that writes each line to the stream at once."""
    return lambda line: print(line, file=stream, flush=True)


def summary(history: History, folder: RunFolder, *, steps: int, stopped: bool, report: str | None) -> dict[str, Any]:
    """The last metrics and the paths of the run's files, for JSON; unknown values are None."""
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
    """First and last value of the main metrics, and of the seconds of each stage."""
    rows = [("held-out reward", *_ends(history.held_out(), "{:.3f}"))]
    rows += [(words, *_ends(history.series(name), form)) for words, name, form in TRENDS]
    found = {name.removeprefix(STAGE) for row in history.steps.values() for name in row if name.startswith(STAGE)}
    stages = [stage for stage in ORDER if stage in found] + sorted(found - set(ORDER))
    rows += [(f"  {stage}", *_ends(history.series(STAGE + stage), "{:.2f}")) for stage in stages]
    lines = [f"{'':20}{'first':>10}{'last':>10}"]
    return "\n".join(lines + [f"{words:20}{first:>10}{last:>10}" for words, first, last in rows])


def _ends(series: list[float], form: str) -> tuple[str, str]:
    return (form.format(series[0]), form.format(series[-1])) if series else ("-", "-")
