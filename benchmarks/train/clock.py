"""Where the time of a step goes: stages that all ranks begin and end together, run again where others disturbed them.

A stage's time is that of the slowest rank: nobody starts before all are there, nobody stops before all are through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

from benchmarks.runtime.clock import DISTURBED, Clock
from equilibra.execute.group import ExpertGroup

__all__ = ["Measured", "PatientClock", "Stages"]

T = TypeVar("T")


class Stages:
    """Seconds of the stages of one step."""

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Collective: what runs inside is this stage."""
        self.group.barrier(what=f"beginning the stage {name}")
        start = perf_counter()
        yield
        self.group.barrier(what=f"ending the stage {name}")
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


class Measured(NamedTuple, Generic[T]):
    """What a piece of work returned, and how quiet the machine was meanwhile."""

    result: T
    others_share: float
    """what others had of the core where they had most, as a share of the time"""


class PatientClock(Clock):
    """The runtime bench's clock, for work that returns something."""

    def measure(self, prepare: Callable[[], None], work: Callable[[], T]) -> Measured[T]:
        """Collective: do the work, again while others disturb it and patience lasts; the least disturbed try counts.

        prepare: what must be so before every try.
        """
        self.prepare = prepare
        tries = [self._try(work)]
        while tries[-1].others_share > DISTURBED and self.patience_s > 0:
            self._wait_for_quiet()
            start = perf_counter()
            tries.append(self._try(work))
            self.patience_s -= self.largest(perf_counter() - start)
            self.run_again += 1
        return min(tries, key=lambda one: one.others_share)

    def _try(self, work: Callable[[], T]) -> Measured[T]:
        results: list[T] = []
        timed = self._time_once(lambda: results.append(work()))
        return Measured(results[0], timed.others_share)
