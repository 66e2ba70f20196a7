"""Run a series in several parallel lanes, and write its table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import draw
from benchmarks.chaos.table import write_results

KEPT = "scratch folder; it keeps the records, and an interrupted series continues from them"
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Returns 1 if there was a defect."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2, help="parallel series")
    parser.add_argument("--work", type=Path, default=Path("/tmp/equilibra-chaos"), help=KEPT)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", type=int, nargs="*", help="only these runs of the series, without a table")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    raw = asked.work / f"records-{asked.seed}.jsonl"
    if asked.lane is not None:
        return _lane(asked, raw)
    command = [sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]]
    lanes = [subprocess.Popen([*command, "--lane", str(lane)]) for lane in range(asked.lanes)]
    codes = [lane.wait() for lane in lanes]
    if any(codes):
        return max(codes)
    records = _records(raw)
    if asked.only is None:
        asked_for = f"python -m benchmarks.chaos --runs {asked.runs} --seed {asked.seed} --lanes {asked.lanes}"
        write_results(records, asked.output, command=asked_for)
    return int(any(record["verdict"].startswith("defect") for record in records))


def _lane(asked: argparse.Namespace, raw: Path) -> int:
    from benchmarks.chaos.lane import own_disk, run_lane  # noqa: PLC0415 - loads torch

    folder = asked.work / f"lane-{asked.lane}"
    can_fill = own_disk(folder)
    done = {record["number"] for record in _records(raw)} if asked.only is None else set()
    numbers = range(asked.runs) if asked.only is None else asked.only
    mine = [number for at, number in enumerate(numbers) if at % asked.lanes == asked.lane and number not in done]
    run_lane((draw(asked.seed, number, can_fill=can_fill) for number in mine), folder, raw)
    return 0


def _records(raw: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []


if __name__ == "__main__":
    sys.exit(main())
