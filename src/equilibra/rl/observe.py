"""The clock of a step, and observers of a run: world rank 0 has real ones, the others one that ignores everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Clock", "Observer"]


class Clock:
    """Times the stages of one step on this rank, and tells an observer."""

    def __init__(self, observer: Observer, step: int) -> None:
        self.observer, self.number = observer, step
        self.seconds: dict[str, float] = {}
        self._began = perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as part of this stage."""
        self.observer.stage(name, step=self.number)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {"seconds": perf_counter() - self._began, **{f"seconds_{k}": v for k, v in self.seconds.items()}}


class Observer:
    """Hears of stages, steps and evaluations as they happen; what a subclass does not override is ignored."""

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """A stage begins, or has done `done` of `total` parts."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation before this step is over."""

    def note(self, text: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Release files and the terminal."""
