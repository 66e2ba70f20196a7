"""`write_perfetto`: the timeline of one planner as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A rank is a process and a resource of it is a thread; times stay microseconds since the step began.
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
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.report.names import chosen_pair, label_of
from equilibra.report.timeline import hidden_us, words_of

__all__ = ["trace_events", "write_perfetto"]


def write_perfetto(run: Run, path: Path, *, planner: str | None = None, overwrite: bool = False) -> None:
    """Write the events of `planner` (Equilibra, or the nearest there is, if not given)."""
    name = planner if planner is not None else chosen_pair(run.planners)[1]
    if name is None or name not in run.planners:
        raise InputError(f"the run has no planner {name!r}; use one of {', '.join(run.planners)}")
    rows = run.planners[name].events.rows
    if not rows.size:
        raise InputError(f"the run has no events of {name}; there is no timeline to write")
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"planner": label_of(name), "kind": str(run.about.get("kind", "")), "program": "equilibra"},
        "traceEvents": trace_events(rows),
    }
    with atomic_file(Path(path), overwrite=overwrite) as part, part.open("w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)


def trace_events(rows: NDArray[np.void]) -> list[dict[str, Any]]:
    """Names of processes and threads, then one complete event per row."""
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
        title = f"rank {rank}" if rank >= 0 else "all ranks"
        named.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": title}})
        named.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for resource in np.unique(rows["resource"][rows["rank"] == rank]).tolist():
            for name, value in (("thread_name", words_of(Resource(resource))), ("thread_sort_index", resource)):
                key = "name" if name == "thread_name" else "sort_index"
                named.append({"ph": "M", "name": name, "pid": rank, "tid": resource, "args": {key: value}})
    return named


def _title(row: dict[str, Any]) -> str:
    expert = f" of expert {row['expert']}" if row["expert"] >= 0 else ""
    layer = f", layer {row['layer']}" if row["layer"] >= 0 else ""
    return f"{words_of(Kind(row['kind']))}{expert}{layer}"


def _arguments(row: dict[str, Any], hidden: float) -> dict[str, Any]:
    """What applies of the other columns."""
    shown: dict[str, Any] = {
        "stage": words_of(Stage.numbered(row["stage"])),
        "direction": words_of(Direction(row["direction"])),
    }
    shown |= {name: row[name] for name in ("layer", "micro_batch", "peer", "expert") if row[name] >= 0}
    shown |= {name: row[name] for name in ("tokens", "bytes") if row[name] > 0}
    if row["resource"] != Resource.COMPUTE and row["kind"] != Kind.WAIT:
        shown["hidden_us"] = round(hidden, 3)
    return shown
