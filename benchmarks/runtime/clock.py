"""The time of a step on two cores, and the share that other programs took.

A disturbed step says little, and on a shared machine many are disturbed. So the clock watches its core while a step
runs: the core's busy time minus this process's own was taken by others. If others took more than `DISTURBED` of a core,
the clock waits until they are quiet and runs the step again, as long as its patience lasts; the least disturbed step
counts. The measured times play no part in the choice. Where the system does not report this, or a step is too short for
its counters, no step counts as disturbed.

Stages are the parts of a step: all ranks begin and end one together, so its time is that of the slowest rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from equilibra.execute.group import ExpertGroup

DISTURBED = 0.03
"""share of a core that others may have"""
SHORT_S = 0.3
"""the system counts in steps of 10 ms: below this it says nothing"""
STAT = Path("/proc/stat")


T = TypeVar("T")


class Timed(NamedTuple, Generic[T]):
    """One piece of work."""

    seconds: float
    """on the slower rank"""
    others_share: float
    """largest share of a core that other programs had"""
    result: T
    """return value of the work on this rank"""


class Clock:
    """A clock that all ranks call together; it repeats work by the largest disturbance of any rank."""

    def __init__(self, *, prepare: Callable[[], None], largest: Callable[[float], float], patience_s: float) -> None:
        self.prepare, self.largest = prepare, largest
        self.patience_s = patience_s
        """seconds left for waiting and for repeating work"""
        self.run_again = 0
        """pieces of work so far"""

    def time(self, work: Callable[[], T], *, prepare: Callable[[], None] | None = None) -> Timed[T]:
        """Time a piece of work; all ranks start together, after `prepare` (None: the clock's) before every try."""
        tries = [self._time_once(work, prepare or self.prepare)]
        while tries[-1].others_share > DISTURBED and self.patience_s > 0:
            self._wait_for_quiet()
            tries.append(self._time_once(work, prepare or self.prepare))
            self.patience_s -= tries[-1].seconds
            self.run_again += 1
        return min(tries, key=lambda found: found.others_share)

    def _time_once(self, work: Callable[[], T], prepare: Callable[[], None]) -> Timed[T]:
        prepare()
        mine = _watched(work)
        return Timed(self.largest(mine.seconds), self.largest(mine.others_share), mine.result)

    def _wait_for_quiet(self) -> None:
        while self.patience_s > 0:
            waited = _watched(lambda: sleep(1))
            self.patience_s -= self.largest(waited.seconds)
            if self.largest(waited.others_share) <= DISTURBED:
                return


def _watched(work: Callable[[], T]) -> Timed[T]:
    """Run something on this rank."""
    before, spent, start = busy_seconds(), process_time(), perf_counter()
    result = work()
    seconds, spent, after = perf_counter() - start, process_time() - spent, busy_seconds()
    if before is None or after is None or seconds < SHORT_S:
        return Timed(seconds, 0.0, result)
    return Timed(seconds, max(after - before - spent, 0.0) / seconds, result)


def busy_seconds(stat: Path = STAT) -> float | None:
    """Busy seconds of this process's core since boot, by kind; None: unknown."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) != 1 or not stat.is_file():
        return None
    name = f"cpu{min(cores)}"
    for line in stat.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) for word in words[1:9])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return None


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
