"""Clock: where a step's time goes, by stage, while an observer is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from equilibra.rl.observe import Observer

__all__ = ["Clock"]


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
