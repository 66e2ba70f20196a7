"""Raw records of the GPU bench, one per case, layer, micro-batch, contender, repeat and rank; and times from them.

Symbols: Q repeats.

The time of a layer and micro-batch is that of its slowest rank (weights that arrive before it starts, forward,
backward) plus the time of online planning before it. Ratios are to balanced ranks timed around a rank: a device's clock
drifts, and passes differ by chance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.contenders import NAMES
from benchmarks.suite import spread
from equilibra.core.atomic import atomic_file
from equilibra.core.errors import InputError

FIELDS = np.dtype([
    ("case", "i2"), ("contender", "u1"), ("layer", "i2"), ("micro_batch", "i2"), ("repeat", "i2"), ("rank", "i2"),
    ("rows", "i4"), ("instances", "i2"), ("copies", "i2"), ("bytes", "i8"), ("plan_us", "f4"), ("copy_us", "f4"),
    ("forward_us", "f4"), ("backward_us", "f4"), ("late_us", "f4"),
])  # fmt: skip
"""contender: its number in NAMES; layer: of the recording; copies: weights that came in; bytes: all that moved;
plan_us: the same on every rank; late_us: what compute waited for copies, part of the passes"""


NEIGHBOURS = 4
"""ranks before and after one that ran so near to it that the clock was the same"""


@dataclass(kw_only=True, eq=False)
class Records:
    """All records of a run, and the names of its cases."""

    cases: list[str] = field(default_factory=list)
    """names, in the order of their numbers"""
    rows: NDArray[Any] = field(default_factory=lambda: np.zeros(0, FIELDS))
    """of FIELDS"""

    def add(self, case: str, rows: NDArray[Any]) -> None:
        """Add records of a case, replacing earlier ones of the same name."""
        if case in self.cases:
            self.rows = self.rows[self.rows["case"] != self.cases.index(case)]
        else:
            self.cases.append(case)
        rows = rows.copy()
        rows["case"] = self.cases.index(case)
        self.rows = np.concatenate([self.rows, rows])

    def of(self, case: str, contender: str | None = None) -> NDArray[Any]:
        """Records of a case and, if named, one of its contenders."""
        rows: NDArray[Any] = self.rows[self.rows["case"] == self.cases.index(case)]
        return rows if contender is None else rows[rows["contender"] == NAMES.index(contender)]


def rank_times(rows: NDArray[Any]) -> NDArray[np.float64]:
    """[records] microseconds of each rank's passes."""
    us: NDArray[np.float64] = rows["copy_us"].astype(np.float64) + rows["forward_us"] + rows["backward_us"]
    return us


def layer_times(rows: NDArray[Any]) -> NDArray[np.float64]:
    """[Q, layers x micro-batches] microseconds of a contender's slowest rank, after its online planning."""
    cell, cells = _numbered(rows, ("layer", "micro_batch"))
    repeat, repeats = _numbered(rows, ("repeat",))
    times = np.full((repeats, cells), -np.inf)
    np.maximum.at(times, (repeat, cell), rank_times(rows) + rows["plan_us"])
    if not np.isfinite(times).all():
        raise InputError("records of some repeats are missing: every layer needs all repeats")
    return times


def relative_times(rows: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    """[Q] a contender's time over the reference's, in every repeat; the slowest rank of each layer and micro-batch.

    The reference has the same work on every rank. What differs there is the device's clock, which drifts, and chance,
    which no rank shares with its neighbours: every rank's time is taken over the median of the reference's ranks that
    ran around it in the same round. Layers count by the reference's time.
    """
    return _relative(rows, reference, settle=False)


def settled_ratio(rows: NDArray[Any], reference: NDArray[Any]) -> float:
    """The same, where a rank's ratio is its median over repeats.

    The slowest of many ranks in one repeat is slow by chance too, and the more so the more ranks there are.
    """
    return float(_relative(rows, reference, settle=True)[0])


def _relative(rows: NDArray[Any], reference: NDArray[Any], *, settle: bool) -> NDArray[np.float64]:
    theirs_CRQ = _cells(reference)
    ratio_CRQ = _cells(rows) / _around(theirs_CRQ)
    if settle:
        ratio_CRQ = np.median(ratio_CRQ, axis=2, keepdims=True)
    weight_C = theirs_CRQ.mean(axis=(1, 2))
    total: NDArray[np.float64] = (ratio_CRQ.max(axis=1) * weight_C[:, None]).sum(axis=0) / weight_C.sum()
    return total


def _around(times_CRQ: NDArray[np.float64]) -> NDArray[np.float64]:
    """[C, R, Q] the median of a rank and of its neighbours on both sides."""
    ranks = range(times_CRQ.shape[1])
    near = [np.median(times_CRQ[:, max(r - NEIGHBOURS, 0) : r + NEIGHBOURS + 1], axis=1) for r in ranks]
    return np.stack(near, axis=1)


def _cells(rows: NDArray[Any]) -> NDArray[np.float64]:
    """[C, R, Q] microseconds by layer and micro-batch, rank and repeat."""
    (cell, cells), (rank, ranks), (repeat, repeats) = (
        _numbered(rows, names) for names in (("layer", "micro_batch"), ("rank",), ("repeat",))
    )
    times = np.full((cells, ranks, repeats), np.nan)
    times[cell, rank, repeat] = rank_times(rows) + rows["plan_us"]
    if not np.isfinite(times).all():
        raise InputError("records of some repeats are missing: every layer needs all repeats")
    return times


def ratio(settled: float, of_repeats: Any) -> dict[str, Any]:  # noqa: ANN401
    """A ratio of settled times, and the least and largest of single repeats."""
    return {**spread(of_repeats), "median": settled}


def _numbered(rows: NDArray[Any], names: tuple[str, ...]) -> tuple[NDArray[np.int64], int]:
    """A number for every combination of fields, in their order, and the count of combinations."""
    every = np.stack([rows[name].astype(np.int64) for name in names], axis=1)
    values, number = np.unique(every, axis=0, return_inverse=True)
    return number.reshape(-1), len(values)


def save_records(records: Records, file: Path) -> None:
    """Write records to a compressed file."""
    about = json.dumps({"cases": records.cases, "contenders": NAMES})
    with atomic_file(file, overwrite=True) as part, part.open("wb") as target:
        np.savez_compressed(target, records=records.rows, about=np.array(about))


def load_records(file: Path) -> Records:
    """Read what `save_records` wrote."""
    try:
        with np.load(file) as found:
            about, rows = json.loads(str(found["about"])), found["records"]
        if about["contenders"] != list(NAMES) or rows.dtype != FIELDS:
            raise InputError(f"{file} has records of another version of this bench; choose another folder")
        return Records(cases=about["cases"], rows=rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} has no records of this bench ({error}); choose another folder") from error
