"""The clock of a step, and the observers of a run: real ones on world rank 0, one that ignores everything elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import methodcaller
from time import perf_counter


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


class Relay(Observer):
    """Passes every call on to `hear`, as a `methodcaller` that repeats it on another observer; it can be pickled."""

    def __init__(self, hear: Callable[[methodcaller], object]) -> None:
        self._hear = hear

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        self._hear(methodcaller("stage", name, step=step, done=done, total=total))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._hear(methodcaller("step", step, _plain(metrics)))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._hear(methodcaller("evaluated", step, _plain(metrics)))

    def note(self, text: str) -> None:
        self._hear(methodcaller("note", text))

    def close(self) -> None:
        self._hear(methodcaller("close"))


def several(*observers: Observer) -> Relay:
    """One observer for several: it passes everything on to them, in order."""
    return Relay(lambda call: [call(one) for one in observers])


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Python floats, which any process can unpickle without numpy."""
    return {name: float(value) for name, value in metrics.items()}
