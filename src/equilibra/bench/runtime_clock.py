"""The time of a step on two cores, and how much of it other programs had.

A step that others disturbed says little, and on a shared machine many are. So the clock looks at its core while a step
runs: what the core was busy with, less what this process spent, was others'. A step in which others had more than
`DISTURBED` of a core is run again, at most `TRIES` times, and the least disturbed of them counts. The times themselves
play no part in the choice. Where the system does not tell, or a step is too short for its counters, none counts as
disturbed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

__all__ = ["DISTURBED", "Timed", "busy_seconds", "least_disturbed"]

DISTURBED = 0.03
"""share of a core that others may have had"""
TRIES = 3
SHORT_S = 0.3
"""the counters have steps of 10 ms: below this they say nothing"""
STAT = Path("/proc/stat")


class Timed(NamedTuple):
    """One step."""

    seconds: float
    """on the slower rank"""
    others_share: float
    """what others had of the core where they had most, as a share of the step's time"""


def busy_seconds(stat: Path = STAT) -> float | None:
    """What the one core that this process may use was busy with since the start of the system; None: not known."""
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


def least_disturbed(
    step: Callable[[], None], *, prepare: Callable[[], None], largest: Callable[[float], float]
) -> tuple[Timed, int]:
    """Run a step until others let it; the step that counts, and how many were run again.

    prepare: before every try; all ranks leave it together. largest: of all ranks. So all ranks decide alike.
    """
    tries: list[Timed] = []
    while len(tries) < TRIES:
        prepare()
        before, spent, start = busy_seconds(), process_time(), perf_counter()
        step()
        seconds, spent, after = perf_counter() - start, process_time() - spent, busy_seconds()
        others = 0.0
        if before is not None and after is not None and seconds >= SHORT_S:
            others = max(after - before - spent, 0.0) / seconds
        tries.append(Timed(largest(seconds), largest(others)))
        if tries[-1].others_share <= DISTURBED:
            break
    return min(tries, key=lambda found: found.others_share), len(tries) - 1
