"""The timeline: for the page, and as a Chrome trace that ui.perfetto.dev and chrome://tracing open.

An event on another resource is hidden while its rank's compute stream is busy, and exposed otherwise. The stream does
one thing at a time, so its busy time up to a moment is piecewise linear; an event's hidden part is the difference of
two values of that function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_file
from equilibra.core.errors import InputError
from equilibra.core.visit import Stage
from equilibra.events.run import Run
from equilibra.events.schema import EVENT, Direction, Kind, Resource
from equilibra.report.figures import chosen_pair, label_of, pack

MAX_RANKS = 16
"""ranks that fit on the page; of more, SOME_RANKS are shown"""
SOME_RANKS = 8
COLUMNS = tuple(name for name in EVENT.names or () if name not in ("start_us", "end_us"))
PROPER = {"NVLINK": "NVLink", "NIC": "network", "CPU": "CPU"}
TICKS_US = (0.01, 0.1, 1.0, 10.0, 1000.0)


def timeline(run: Run, num_ranks: int) -> dict[str, Any]:
    """The words for column values, the ranks shown, and the packed events and totals of every planner."""
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
    """All ranks; of many, the busiest, the least busy and evenly spaced ones, by the first planner's events."""
    if num_ranks <= MAX_RANKS:
        return np.arange(num_ranks)
    rows = next(iter(run.planners.values())).events.rows
    experts = rows[(rows["kind"] == Kind.EXPERTS) & (rows["rank"] >= 0) & (rows["rank"] < num_ranks)]
    busy = np.bincount(experts["rank"], experts["end_us"] - experts["start_us"], minlength=num_ranks)
    chosen = [int(busy.argmax()), int(busy.argmin())]
    chosen += [int(rank) for rank in np.linspace(0, num_ranks - 1, SOME_RANKS).astype(int) if rank not in chosen]
    return np.sort(np.unique(chosen[:SOME_RANKS]))


def hidden_us(rows: NDArray[np.void]) -> NDArray[np.float64]:
    """[N] microseconds of each event under its rank's busy compute stream; 0 for compute and waits."""
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
    """Per kind: microseconds per rank, and how many of them are hidden, over all ranks with events."""
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
    """Packed columns of these ranks' events; starts as differences, times in ticks that fit 32 bits."""
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


def write_perfetto(run: Run, path: Path, *, planner: str | None = None, overwrite: bool = False) -> None:
    """Write the events of `planner` (by default Equilibra or its closest substitute) as a Chrome trace.

    A rank is a process and each of its resources a thread; times are microseconds since the step began.
    """
    name = planner if planner is not None else chosen_pair(run.planners)[1]
    if name is None or name not in run.planners:
        raise InputError(f"the run has no planner {name!r}; use one of {', '.join(run.planners)}")
    rows = run.planners[name].events.rows
    if not rows.size:
        raise InputError(f"the run has no events of {name}, so there is no timeline to write")
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"planner": label_of(name), "kind": str(run.about.get("kind", "")), "program": "equilibra"},
        "traceEvents": _trace_events(rows),
    }
    with atomic_file(Path(path), overwrite=overwrite) as part, part.open("w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)


def _trace_events(rows: NDArray[np.void]) -> list[dict[str, Any]]:
    """Names of processes and threads, then one complete event ("X") per row."""
    events = _names(rows)
    columns = [rows[name].tolist() for name in rows.dtype.names or ()]
    for values, hidden in zip(zip(*columns, strict=True), hidden_us(rows).tolist(), strict=True):
        row = dict(zip(rows.dtype.names or (), values, strict=True))
        events.append({
            "name": _title(row),
            "cat": words_of(Kind(row["kind"])),
            "ph": "X",
            "ts": row["start_us"],
            "dur": row["end_us"] - row["start_us"],
            "pid": row["rank"],
            "tid": row["resource"],
            "args": _arguments(row, hidden),
        })  # fmt: skip
    return events


def _names(rows: NDArray[np.void]) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = []
    for rank in np.unique(rows["rank"]).tolist():
        resources = np.unique(rows["resource"][rows["rank"] == rank]).tolist()
        title = f"rank {rank}" if rank >= 0 else "all ranks"
        lines = [("process", 0, title, rank), *(("thread", n, words_of(Resource(n)), n) for n in resources)]
        for what, thread, name, index in lines:
            for key, value in (("name", name), ("sort_index", index)):
                named.append({"ph": "M", "name": f"{what}_{key}", "pid": rank, "tid": thread, "args": {key: value}})
    return named


def _title(row: dict[str, Any]) -> str:
    expert = f" of expert {row['expert']}" if row["expert"] >= 0 else ""
    layer = f", layer {row['layer']}" if row["layer"] >= 0 else ""
    return f"{words_of(Kind(row['kind']))}{expert}{layer}"


def _arguments(row: dict[str, Any], hidden: float) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "stage": words_of(Stage.numbered(row["stage"])),
        "direction": words_of(Direction(row["direction"])),
    }
    shown |= {name: row[name] for name in ("layer", "micro_batch", "peer", "expert") if row[name] >= 0}
    shown |= {name: row[name] for name in ("tokens", "bytes") if row[name] > 0}
    if row["resource"] != Resource.COMPUTE and row["kind"] != Kind.WAIT:
        shown["hidden_us"] = round(hidden, 3)
    return shown
