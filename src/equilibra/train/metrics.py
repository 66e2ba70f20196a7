"""What a run reports: metrics.jsonl, the history and curves made from it, lines of text, and the summary at the end.

metrics.jsonl has one line per step and evaluation:

    {"kind": "step", "step": 3, "reward": 0.41, ...}
    {"kind": "evaluation", "step": 20, "reward_held_out": 0.44}

Steps count from 0; the evaluation of step s comes before step s. Values that are not finite are null. Readers skip
lines torn by a crash. A resumed run first cuts the steps that it will repeat, so no step is there twice.

Log files and pipes get the same as text:

    step  12/60  reward 0.412  kl 0.0012  entropy  1.31  imbalance 1.84 > 1.02  exposed  1.2%   12,345 tokens/s   3.1 s
    held out     reward 0.437 after 20 steps
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any

from equilibra.core.atomic import atomic_file, cannot
from equilibra.rl.observe import Observer
from equilibra.train.run_folder import RunFolder

STEP, EVALUATION = "step", "evaluation"
MAX_POINTS = 2000
"""most steps, and most evaluations, of the curves"""
MAX_STAGES = 16
"""most stages whose seconds get a curve"""
METRICS = (
    "reward", "kl", "entropy", "loss", "imbalance_static", "imbalance", "exposed", "mismatch_max", "tokens_per_s",
    "seconds",
)  # fmt: skip
"""metrics with a curve, besides the seconds of stages"""
STAGE = "seconds_"
"""before the name of a stage: its metric"""
SLOW = ("start", "warm-up", "report")
"""stages that get their own lines, because no step ends meanwhile"""
STARTING = "loads libraries; the first time it also compiles, about a minute"
EXPLAINED = {"start": f"start ({STARTING})"}
PARTS = 4
"""lines that a slow stage of known length gets"""
COLUMNS = (
    "reward {reward:.3f}", "kl {kl:.4f}", "entropy {entropy:5.2f}",
    "imbalance {imbalance_static:.2f} > {imbalance:.2f}", "exposed {exposed:5.1%}", "{tokens_per_s:8,.0f} tokens/s",
    "{seconds:5.1f} s",
)  # fmt: skip
"""columns of a step's line; those without all their metrics are left out"""
TRENDS = (
    ("reward", "reward", "{:.3f}"),
    ("imbalance, static", "imbalance_static", "{:.2f}"),
    ("imbalance, now", "imbalance", "{:.2f}"),
    ("tokens per second", "tokens_per_s", "{:,.0f}"),
    ("seconds per step", "seconds", "{:.2f}"),
)
"""rows of the summary: label, metric, format"""
ORDER = ("rollout", "reward", "plan", "logprob", "advantages", "update", "weights", "checkpoint")
"""stages in the summary's order; others follow by name"""


@dataclass(frozen=True, kw_only=True)
class History:
    """Metrics that a run has reported so far, by step."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a finished step; drops this and later steps, which are from before a restart."""
        _forget(step, self.steps)
        _forget(step + 1, self.evaluations)
        self.steps[step] = dict(metrics)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation before this step; drops later ones."""
        _forget(step, self.evaluations)
        self.evaluations[step] = dict(metrics)

    def series(self, name: str) -> list[float]:
        """Finite values of a metric over the steps."""
        return _finite(self.steps, name)

    def held_out(self) -> list[float]:
        """Finite mean rewards on held-out problems over the evaluations."""
        return _finite(self.evaluations, "reward_held_out")

    def last(self, name: str) -> float | None:
        """The metric of the newest step; None if it has none."""
        return self.steps[max(self.steps)].get(name) if self.steps else None


def _forget(step: int, rows: dict[int, dict[str, float]]) -> None:
    for later in [one for one in rows if one >= step]:
        del rows[later]


def _finite(rows: dict[int, dict[str, float]], name: str) -> list[float]:
    return [row[name] for _, row in sorted(rows.items()) if name in row and math.isfinite(row[name])]


class MetricsFile(Observer):
    """An observer that appends to the file. It opens the file for every line, because `cut` may replace it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(STEP, step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(EVALUATION, step, metrics)

    def cut(self, step: int) -> None:
        """Drop torn lines and the lines from `step` on, the next step to run."""
        if not self.path.exists():
            return
        kept = [row for row in _rows(self.path) if row["step"] < step]
        with atomic_file(self.path, overwrite=True) as part:
            part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")

    def _append(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step}
        plain = {name: float(value) for name, value in metrics.items() if name not in row}
        row |= {name: value if math.isfinite(value) else None for name, value in plain.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # after a torn line
                file.write(line)
        except OSError as error:
            raise cannot("write", self.path, error) from error


def read_history(path: Path) -> History:
    """The history in the file; empty if there is no file."""
    history = History()
    for row in _rows(path) if path.exists() else ():
        metrics = {
            name: math.nan if value is None else float(value)
            for name, value in row.items() if value is None or isinstance(value, int | float)
        }  # fmt: skip
        del metrics["step"]
        (history.add_step if row["kind"] == STEP else history.add_evaluation)(row["step"], metrics)
    return history


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise cannot("read", path, error) from error
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn by a crash, or edited
            continue
        if isinstance(row, dict) and row.get("kind") in {STEP, EVALUATION} and type(row.get("step")) is int:
            yield row


def curves(history: History) -> dict[str, Any] | None:
    """The history as columns of bounded size, for the report; None before the first step is finished.

        {"num_steps": 100, "every": 1, "steps": {"step": [0, 1, ...], "reward": [0.29, ...], ...},
         "held_out": {"step": [0, 20, ...], "reward": [0.29, ...]}}

    Of a long run every n-th step is kept, counted back from the last.
    """
    if not history.steps:
        return None
    every = -(-len(history.steps) // MAX_POINTS)
    chosen = _thinned(sorted(history.steps), every)
    stages = list(dict.fromkeys(name for step in chosen for name in history.steps[step] if name.startswith(STAGE)))
    columns = {name: _column(history.steps, chosen, name) for name in (*METRICS, *stages[:MAX_STAGES])}
    known = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    asked = sorted(history.evaluations)
    asked = _thinned(asked, -(-len(asked) // MAX_POINTS))
    return {
        "num_steps": len(history.steps),
        "every": every,
        "steps": {"step": chosen, **known},
        "held_out": {"step": asked, "reward": _column(history.evaluations, asked, "reward_held_out")},
    }


def _thinned(steps: Sequence[int], every: int) -> list[int]:
    return list(steps[:: -max(every, 1)][::-1])


def _column(rows: Mapping[int, Mapping[str, float]], steps: Sequence[int], name: str) -> list[float | None]:
    """Values to six digits, which is all that a curve shows; None where not finite."""
    values = (rows[step].get(name, math.nan) for step in steps)
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """The line of a step, as in the module's example."""
    parts = [_numbered(step, steps)]
    for column in COLUMNS:
        with suppress(KeyError):
            parts.append(column.format_map(metrics))
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


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, on disk at once."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise cannot("write", path, error) from error


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
