"""Events: what ran where and when. One schema for predicted and measured, so that the two can be compared.

An event is one span on one resource of one rank. The simulator writes predicted ones; a runtime writes measured ones
with the same columns. Times are microseconds since the step began. Columns that do not apply hold -1 (numbers of
things) or 0 (amounts).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.visit import Stage

__all__ = ["EVENT", "Direction", "Events", "Kind", "Resource", "event_table"]


class Kind(IntEnum):
    """What happened."""

    ATTENTION = 0
    """attention and the other dense parts of a layer"""
    EXPERTS = 1
    """matrix products of the experts; `tokens` are (token, expert) pairs"""
    DISPATCH = 2
    """tokens to their experts; `bytes` leave or reach this rank, whichever are more"""
    COMBINE = 3
    """results back to their tokens"""
    COUNTS = 4
    """exchange of counts, where split sizes are not known ahead"""
    PLAN = 5
    """planning"""
    FLASH_COPY = 6
    """weights of `expert` from rank `peer` into a spare slot of `rank`"""
    FLASH_GRADIENT = 7
    """gradient of a flash copy from `rank` home to `peer`"""
    STANDING_COPY = 8
    """weights of a standing copy"""
    STANDING_GRADIENT = 9
    """gradient of a standing copy home"""
    MIGRATION = 10
    """a home moves, with optimizer state"""
    REDUCE = 11
    """gradients summed over data-parallel replicas"""
    OPTIMIZER = 12
    """optimizer step"""
    WAIT = 13
    """a rank stands still for others (`layer`'s slowest rank) or for a copy"""


class Resource(IntEnum):
    """What it occupied."""

    COMPUTE = 0
    """compute stream of the device"""
    COPY_ENGINE = 1
    """copy engines, and the link behind them"""
    NVLINK = 2
    """links inside a node"""
    NIC = 3
    """network across nodes"""
    HOST_LINK = 4
    """link to host memory"""
    CPU = 5
    """host processor"""


class Direction(IntEnum):
    """Which pass through a layer."""

    FORWARD = 0
    BACKWARD = 1
    FORWARD_AGAIN = 2
    """activations computed anew for the backward pass"""


EVENT = np.dtype([
    ("kind", "u1"), ("resource", "u1"), ("stage", "u1"), ("direction", "u1"),
    ("layer", "i2"), ("micro_batch", "i4"), ("rank", "i4"), ("peer", "i4"), ("expert", "i4"),
    ("tokens", "i8"), ("bytes", "i8"), ("start_us", "f8"), ("end_us", "f8"),
])  # fmt: skip
"""columns of one event"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """A table of events, sorted by start."""

    rows: NDArray[np.void]
    """[N] of EVENT"""

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.ndim != 1 or rows.dtype != EVENT:
            raise InputError(f"events must be one list with the columns {', '.join(EVENT.names or ())}")
        if not (np.isfinite(rows["start_us"]).all() and np.isfinite(rows["end_us"]).all()):
            raise InputError("events must start and end at finite times")
        if (rows["end_us"] < rows["start_us"]).any() or rows["start_us"].min(initial=0) < 0:
            raise InputError("events must not end before they start, nor start before the step")
        if (np.diff(rows["start_us"]) < 0).any():
            raise InputError("events must be sorted by their start")
        for column, names in (("kind", Kind), ("resource", Resource), ("stage", Stage), ("direction", Direction)):
            if rows[column].max(initial=0) >= len(names):
                raise InputError(
                    f"events have an unknown {column}: {rows[column].max()}, the largest is {len(names) - 1}"
                )
        rows.setflags(write=False)

    @classmethod
    def of(cls, *parts: NDArray[np.void]) -> Events:
        """Events of several unsorted tables."""
        rows = np.concatenate([np.zeros(0, EVENT), *parts])
        return cls(rows=rows[np.argsort(rows["start_us"], kind="stable")])

    def where(self, **columns: int) -> NDArray[np.void]:
        """The events whose columns have these values."""
        chosen = np.ones(self.rows.size, np.bool_)
        for name, value in columns.items():
            chosen &= self.rows[name] == value
        return self.rows[chosen]


def event_table(count: int, **columns: Any) -> NDArray[np.void]:  # noqa: ANN401
    """`count` events with these columns (numbers or arrays); things that are not given are -1, amounts 0."""
    rows = np.zeros(count, EVENT)
    for name in ("layer", "micro_batch", "rank", "peer", "expert"):
        rows[name] = -1
    for name, value in columns.items():
        rows[name] = value
    return rows
