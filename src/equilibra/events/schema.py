"""Events: what ran where and when, with one schema for predicted and measured ones.

An event is one span on one resource of one rank. The simulator writes predicted events, the runtime measured ones,
with the same columns. Times are microseconds since the step began. Columns that do not apply are -1 (indices) or 0
(amounts).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.visit import Stage


class Kind(IntEnum):
    """What happened."""

    ATTENTION = 0
    """attention and the other dense parts of a layer"""
    EXPERTS = 1
    """expert GEMMs; `tokens` are (token, expert) pairs"""
    DISPATCH = 2
    """tokens to their experts; `bytes` is the larger of sent and received"""
    COMBINE = 3
    """expert outputs back to their tokens"""
    COUNTS = 4
    """exchange of counts, where split sizes are not known ahead"""
    PLAN = 5
    FLASH_COPY = 6
    """weights of `expert` from rank `peer` into a spare slot of `rank`"""
    FLASH_GRADIENT = 7
    """gradient of a flash copy from `rank` home to `peer`"""
    STANDING_COPY = 8
    STANDING_GRADIENT = 9
    MIGRATION = 10
    """a home moves, with optimizer state"""
    REDUCE = 11
    """gradients summed over data-parallel replicas"""
    OPTIMIZER = 12
    WAIT = 13
    """a rank waits for `layer`'s slowest rank or for a copy"""


class Resource(IntEnum):
    """What an event occupied."""

    COMPUTE = 0
    """compute stream of the device"""
    COPY_ENGINE = 1
    """copy engines and their link"""
    NVLINK = 2
    """links inside a node"""
    NIC = 3
    """network between nodes"""
    HOST_LINK = 4
    """link to host memory"""
    CPU = 5


class Direction(IntEnum):
    """Which pass through a layer."""

    FORWARD = 0
    BACKWARD = 1
    FORWARD_AGAIN = 2
    """activation recompute for the backward pass"""


EVENT = np.dtype([
    ("kind", "u1"), ("resource", "u1"), ("stage", "u1"), ("direction", "u1"),
    ("layer", "i2"), ("micro_batch", "i4"), ("rank", "i4"), ("peer", "i4"), ("expert", "i4"),
    ("tokens", "i8"), ("bytes", "i8"), ("start_us", "f8"), ("end_us", "f8"),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """A table of events, sorted by start time."""

    rows: NDArray[np.void]
    """[N] of EVENT"""

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.ndim != 1 or rows.dtype != EVENT:
            raise InputError(f"events must be one table with the columns {', '.join(EVENT.names or ())}")
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
        """Events from unsorted tables."""
        rows = np.concatenate([np.zeros(0, EVENT), *parts])
        return cls(rows=rows[np.argsort(rows["start_us"], kind="stable")])

    def where(self, **columns: int) -> NDArray[np.void]:
        """The rows whose columns have these values."""
        chosen = np.ones(self.rows.size, np.bool_)
        for name, value in columns.items():
            chosen &= self.rows[name] == value
        return self.rows[chosen]


def event_table(count: int, **columns: Any) -> NDArray[np.void]:  # noqa: ANN401
    """`count` events with these columns (numbers or arrays); indices that are not given are -1, amounts 0."""
    rows = np.zeros(count, EVENT)
    for name in ("layer", "micro_batch", "rank", "peer", "expert"):
        rows[name] = -1
    for name, value in columns.items():
        rows[name] = value
    return rows
