"""The timeline for the page: which ranks are shown, and how much of every event is hidden under compute.

An event on another resource than compute is hidden while the compute stream of its rank is busy, and exposed for the
rest. On one rank the compute stream does one thing at a time, so the busy time before any moment is a piecewise linear
function, and what an event overlaps is a difference of two of its values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.visit import Stage
from equilibra.events.run import Run
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.report.pack import pack

__all__ = ["MAX_RANKS", "hidden_us", "kind_totals", "shown_ranks", "timeline", "words_of"]

MAX_RANKS = 16
"""more ranks than this cannot be read; of more, a few are shown"""
SOME_RANKS = 8
COLUMNS = (
    "kind",
    "resource",
    "stage",
    "direction",
    "layer",
    "micro_batch",
    "rank",
    "peer",
    "expert",
    "tokens",
    "bytes",
)
PROPER = {"NVLINK": "NVLink", "NIC": "network", "CPU": "CPU"}
TICKS_US = (0.01, 0.1, 1.0, 10.0, 1000.0)


def timeline(run: Run, num_ranks: int) -> dict[str, Any]:
    """Names of the columns' values, the ranks that are shown, and the packed events and totals of every planner."""
    ranks = shown_ranks(run, num_ranks)
    return {
        "kinds": [words_of(kind) for kind in Kind],
        "resources": [words_of(resource) for resource in Resource],
        "stages": [words_of(stage) for stage in Stage],
        "directions": [words_of(direction) for direction in Direction],
        "ranks": ranks.tolist(),
        "planners": {
            name: _packed_events(record.events.rows, ranks)
            for name, record in run.planners.items()
            if record.events.rows.size
        },
    }


def shown_ranks(run: Run, num_ranks: int) -> NDArray[np.int64]:
    """All ranks, or of many: the busiest, the idlest, and some at even distances (by the first planner's events)."""
    if num_ranks <= MAX_RANKS:
        return np.arange(num_ranks)
    rows = next(iter(run.planners.values())).events.rows
    experts = rows[(rows["kind"] == Kind.EXPERTS) & (rows["rank"] >= 0) & (rows["rank"] < num_ranks)]
    busy = np.bincount(experts["rank"], experts["end_us"] - experts["start_us"], minlength=num_ranks)
    chosen = [int(busy.argmax()), int(busy.argmin())]
    chosen += [int(rank) for rank in np.linspace(0, num_ranks - 1, SOME_RANKS).astype(int) if rank not in chosen]
    return np.sort(np.unique(chosen[:SOME_RANKS]))


def hidden_us(rows: NDArray[np.void]) -> NDArray[np.float64]:
    """[N] time of each event during which the compute stream of its rank was busy; 0 for compute itself and waits."""
    hidden = np.zeros(rows.size)
    on_compute = rows["resource"] == Resource.COMPUTE
    busy, beside = on_compute & (rows["kind"] != Kind.WAIT), ~on_compute & (rows["kind"] != Kind.WAIT)
    for rank in np.unique(rows["rank"][beside]):
        under = rows[busy & (rows["rank"] == rank)]
        asked = np.flatnonzero(beside & (rows["rank"] == rank))
        if under.size:
            starts, ends = under["start_us"], np.maximum.accumulate(under["end_us"])
            starts = np.maximum(starts, np.concatenate([[0.0], ends[:-1]]))
            ends = np.maximum(starts, ends)
            moments = np.stack([starts, ends], axis=1).reshape(-1)
            before = np.stack([np.zeros_like(starts), ends - starts], axis=1).reshape(-1).cumsum()
            hidden[asked] = np.interp(rows["end_us"][asked], moments, before) - np.interp(
                rows["start_us"][asked], moments, before
            )
    return hidden


def kind_totals(rows: NDArray[np.void]) -> list[dict[str, Any]]:
    """Per kind: microseconds per rank, of them hidden; over all ranks that have events."""
    num_ranks = max(1, np.unique(rows["rank"][rows["rank"] >= 0]).size)
    length, hidden = rows["end_us"] - rows["start_us"], hidden_us(rows)
    totals = []
    for kind in Kind:
        chosen = rows["kind"] == kind
        if chosen.any():
            beside = bool((rows["resource"][chosen] != Resource.COMPUTE).any()) and kind != Kind.WAIT
            totals.append({
                "kind": int(kind),
                "events": int(chosen.sum()),
                "us_per_rank": float(length[chosen].sum() / num_ranks),
                "hidden_us_per_rank": float(hidden[chosen].sum() / num_ranks) if beside else None,
            })  # fmt: skip
    return totals


def _packed_events(rows: NDArray[np.void], ranks: NDArray[np.int64]) -> dict[str, Any]:
    """Columns of the events of some ranks; starts as differences, times in ticks that fit 32 bits."""
    totals = kind_totals(rows)
    rows, hidden = rows[np.isin(rows["rank"], ranks)], hidden_us(rows)[np.isin(rows["rank"], ranks)]
    begin = float(rows["start_us"][0]) if rows.size else 0.0
    length = rows["end_us"] - rows["start_us"]
    longest = max(float(length.max(initial=0)), float(np.diff(rows["start_us"]).max(initial=0)), begin)
    tick = next((tick for tick in TICKS_US if longest / tick < 2**31), 1e6)
    ticks = np.rint(rows["start_us"] / tick).astype(np.int64)
    arrays = {name: pack(rows[name]) for name in COLUMNS}
    arrays["start"] = pack(np.diff(ticks, prepend=0))
    arrays["length"] = pack(np.rint(length / tick).astype(np.int64))
    arrays["hidden"] = pack(np.rint(hidden / tick).astype(np.int64))
    return {"tick_us": tick, "totals": totals, "arrays": arrays}


def words_of(member: Kind | Resource | Stage | Direction) -> str:
    """A kind, resource, stage or direction as people read it."""
    return PROPER.get(member.name, member.name.lower().replace("_", " "))
