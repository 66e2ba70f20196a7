"""A run as plain lines: one per step and per evaluation, short and aligned. For files and for what is no terminal.

step  12/60  reward 0.412  kl 0.0012  entropy  1.31  imbalance 1.84 > 1.02  exposed  1.2%   12,345 tokens/s   3.1 s
held out     reward 0.437 after 20 steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from equilibra.core.atomic import cannot

__all__ = ["LogFile", "PlainLog", "step_line", "to_stream"]

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
