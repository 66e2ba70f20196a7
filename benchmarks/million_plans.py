"""Plan a million random visits and execute each on whole numbers: no pair lost, none doubled.

python -m benchmarks.million_plans [FOLDER] [--visits N] [--workers N]     # from the repository
writes FOLDER/million_plans.json and .md

A visit is one layer of one micro-batch in one stage, which the planner plans at a time. A step's number is the seed of
everything random in it. Workers take steps in turn; a failing step ends the run with its number. See
`tests/references/executed.py` for what is drawn and what is compared.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from tests.references.executed import Tally, run_step

BLOCK = 20
"""steps that a worker runs at a time"""


@dataclass
class Block:
    """Counts over some steps."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    clusters: Counter[str] = field(default_factory=Counter)
    routings: Counter[str] = field(default_factory=Counter)
    planners: Counter[str] = field(default_factory=Counter)

    def add(self, other: Block) -> None:
        for name, value in asdict(other.tally).items():
            setattr(self.tally, name, getattr(self.tally, name) + value)
        self.seconds += other.seconds
        for name in ("clusters", "routings", "planners"):
            getattr(self, name).update(getattr(other, name))


def run_block(first: int) -> Block:
    """Plan and execute steps, starting from `first`."""
    block, began = Block(), process_time()
    for seed in range(first, first + BLOCK):
        before = block.tally.visits
        try:
            step = run_step(np.random.default_rng(seed), block.tally)
        except Exception as error:
            raise RuntimeError(f"step {seed} fails: {error}") from error
        visits = block.tally.visits - before
        block.clusters[f"{step.cluster.num_nodes}x{step.cluster.ranks_per_node}"] += visits
        block.routings[step.routing] += visits
        block.planners[step.planner] += visits
    block.seconds = process_time() - began
    return block


def write(folder: Path, total: Block, blocks: int, seconds: float, workers: int) -> None:
    """Write the record and its page."""
    tally = total.tally
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(), "command": "python -m benchmarks.million_plans", "workers": workers,
        "seeds": [0, blocks * BLOCK - 1], "seconds": round(seconds, 1), "cpu_seconds": round(total.seconds, 1),
        "failures": 0, **asdict(tally),
        "clusters": dict(sorted(total.clusters.items())), "routings": dict(sorted(total.routings.items())),
        "planners": dict(sorted(total.planners.items())),
    }  # fmt: skip
    (folder / "million_plans.json").write_text(json.dumps(record, indent=1) + "\n")
    text = f"""# Random plans, executed on values

{tally.visits:,} visits (one layer of one micro-batch in one stage each) of {tally.steps:,} random steps, planned and
executed on whole numbers through the runtime's tables: {tally.pairs:,} (token, expert) pairs, none lost, none doubled,
every token's sum exact.

Measured {record["date"]} on {record["machine"]}, Python {record["python"]}, {workers} workers: {total.seconds:,.0f} s
of CPU time, {seconds:,.0f} s on a shared machine. Seeds 0 to {blocks * BLOCK - 1}. `python -m benchmarks.million_plans`

The plans have {tally.copies:,} flash copies, {tally.standing:,} standing copies and {tally.moves:,} moved homes, on
{len(total.clusters)} clusters of 1 to 8 nodes of 1 to 8 ranks.
"""
    lines = [*text.splitlines(), ""]
    for title, counts in (("planner", total.planners), ("routing", total.routings)):
        lines += [f"| {title} | visits |", "|---|---|"]
        lines += [f"| {name} | {count:,} |" for name, count in sorted(counts.items(), key=lambda item: -item[1])] + [""]
    (folder / "million_plans.md").write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    """Run the steps; write the record whenever a block ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="benchmarks/results", type=Path)
    parser.add_argument("--visits", default=1_000_000, type=int)
    parser.add_argument("--workers", default=2, type=int)
    asked = parser.parse_args()
    total, blocks, began = Block(), 0, perf_counter()
    with ProcessPoolExecutor(asked.workers) as pool:
        waiting = [pool.submit(run_block, number * BLOCK) for number in range(2 * asked.workers)]
        while total.tally.visits < asked.visits:
            total.add(waiting.pop(0).result())
            blocks += 1
            waiting.append(pool.submit(run_block, (blocks + 2 * asked.workers - 1) * BLOCK))
            if blocks % 10 == 0 or total.tally.visits >= asked.visits:
                write(asked.folder, total, blocks, perf_counter() - began, asked.workers)
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
