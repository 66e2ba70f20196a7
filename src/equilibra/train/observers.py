"""Observers of the training program: several at once, and what a screen can do besides observing.

World rank 0 tells what happens to one observer, a `Several`: the metrics file, TensorBoard, log.txt and a screen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from equilibra.rl.observe import Observer

__all__ = ["Screen", "Several"]


class Screen(Observer, Protocol):
    """What a user looks at."""

    def note(self, text: str) -> None:
        """Say something else."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; what is on it stays."""
        ...


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
