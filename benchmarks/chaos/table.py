"""The table of a series: what was injected, how often, what happened."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import INJECTIONS, TIMEOUT_S

ABOUT = """\
{runs} training runs of three steps with a checkpoint after each, a tiny Qwen3-MoE on 2 to 4 ranks, `run.timeout_s`,
`run.checkpoint_timeout_s` and `rollout.timeout_s` {timeout_s:g} s. Each has one injection, at a random moment of the
clock or at a stage. A run must finish with the numbers of an undisturbed run, or end in time with an error that names
the cause; then `equilibra train --resume` must reach those numbers. Numbers are all metrics except times, the weights
of the model folder and the kept checkpoints, compared to the bit. A process or shared-memory segment left behind, a
traceback, or a lost checkpoint is a defect. Libraries are loaded once for all runs."""


def write_results(
    records: Sequence[dict[str, Any]], output: Path, *, command: str, commit: str = "",
    became: Mapping[int, str] | None = None, note: str = "",
) -> None:  # fmt: skip
    """Write OUTPUT/chaos.md and chaos.json.

    commit: if not HEAD. became: by run, how its defect was resolved. note: about the whole series.
    """
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    about = {
        "command": command, "commit": commit or head.stdout.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{_processor()}, {os.cpu_count()} cores", "timeout_s": TIMEOUT_S, "runs": len(records),
    }  # fmt: skip
    ordered = sorted(records, key=lambda record: record["number"])
    text = json.dumps({"about": about, "table": _rows(ordered), "runs": ordered}, indent=1)
    (output / "chaos.json").write_text(text + "\n")
    (output / "chaos.md").write_text(_page(about, ordered, became or {}, note))


def _processor() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per injection: how often, what happened, and the seconds to an error."""
    rows = []
    for injection, words in INJECTIONS.items():
        mine = [record for record in records if record["injection"] == injection]
        seconds = [record["after_s"] for record in mine if record["code"] in (1, 2) and record["after_s"] is not None]
        rows.append({
            "injection": words, "runs": len(mine), "outcomes": dict(Counter(_kind(record) for record in mine)),
            "seconds_to_error": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {},
        })  # fmt: skip
    return rows


def _kind(record: dict[str, Any]) -> str:
    return "defect" if record["verdict"].startswith("defect") else str(record["verdict"])


def _page(about: dict[str, Any], records: Sequence[dict[str, Any]], became: Mapping[int, str], note: str) -> str:
    kinds = sorted({_kind(record) for record in records}, key=lambda kind: (kind == "defect", kind))
    if "defect" not in kinds:
        kinds.append("defect")
    rows = _rows(records)
    head = ["injected", "runs", *kinds, "seconds to an error: median, max"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        seconds = row["seconds_to_error"]
        cells = [row["injection"], row["runs"], *(row["outcomes"].get(kind, 0) for kind in kinds)]
        cells.append(f"{seconds['median']:.1f}, {seconds['max']:.1f}" if seconds else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    totals = [sum(row["outcomes"].get(kind, 0) for row in rows) for kind in kinds]
    lines.append("| " + " | ".join(map(str, ["all", len(records), *totals, ""])) + " |")
    shapes = Counter(record["shape"] for record in records)
    stages = Counter(record["stage"] or "a moment of the clock" for record in records)
    groups = Counter(record["groups"] for record in records)
    defects = [
        f"- run {r['number']} ({r['shape']}, {r['injection']}, rank {r['rank']}, {r['stage'] or 'clock'}): "
        f"{r['verdict']}. {became.get(r['number'], r['message'])}"
        for r in records if _kind(r) == "defect"
    ]  # fmt: skip
    return "\n".join([
        "# Chaos", "",
        f"`{about['command']}`, commit {about['commit']}, {about['date']}, {about['machine']}. Measured.", "",
        ABOUT.format(runs=len(records), timeout_s=about["timeout_s"]), "",
        *([note, ""] if note else []), *lines, "",
        f"One expert-parallel group: {groups[1]} runs; two groups: {groups[2]} runs.", "",
        f"Shapes (nodes x ranks x groups): {_counted(sorted(shapes.items()))}.", "",
        f"Moments: {_counted(stages.most_common())}.", "",
        *(["## Defects", "", *defects, ""] if defects else []),
    ])  # fmt: skip


def _counted(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)
