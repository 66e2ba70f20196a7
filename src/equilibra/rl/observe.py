"""Observer: whoever watches a run. World rank 0 has a real one, the others a silent one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

__all__ = ["STAGES", "Clock", "Observer", "Silent"]

# Clock: where a step's time goes, by stage, while an observer is told.


class Clock:
    """Seconds of the stages of one step on this rank."""

    def __init__(self, observer: Observer, step: int) -> None:
        self.observer, self.number = observer, step
        self.seconds: dict[str, float] = {}
        self._began = perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs inside is this stage."""
        self.observer.stage(name, step=self.number)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds so far, by stage and together."""
        return {"seconds": perf_counter() - self._began, **{f"seconds_{k}": v for k, v in self.seconds.items()}}


STAGES = (
    "start", "warm-up", "weights", "evaluate", "rollout", "reward", "plan", "logprob", "advantages", "update",
    "checkpoint", "report",
)  # fmt: skip
"""what a run does, in the words that users see"""


class Observer(Protocol):
    """Told what happens, as it happens."""

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """A stage begins, or is `done` of `total` parts through."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out problems were answered before this step."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""
