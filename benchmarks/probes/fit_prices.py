"""The cost of copies and their moves to a rank, in rows, by regression over the ranks of a GPU bench.

    python -m benchmarks.probes.fit_prices --results benchmarks/results --traces DIR [--output FILE]

For every shape, times of ranks over the median balanced rank of their case, with and without moves, are fitted by their
rows, the empty part of last tiles, instances beyond homes, weights and gradients that their own copies move, and
gradients that they add, all over a balanced rank's rows. A price is the cost of one of these over the cost of a row,
times the cost that plans assume for a row: plans level rows, and one row more changes a rank's time by about two thirds
of a row's mean cost. The price of an instance includes the mean cost of its last tile's empty part, two thirds of half
a tile, as plans count it.

Plans are made anew by the code that made the records; cases with different rows are refused.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.case import RANKS, Case, GpuSetting, cases_for
from benchmarks.gpu.command import models_asked, routings_asked
from benchmarks.gpu.contenders import BALANCED, EQUILIBRA, STILL_ONE, contenders
from benchmarks.gpu.records import Records, load_records, rank_times
from equilibra.core.errors import InputError
from equilibra.cost.presets import H200_KERNELS

COMMAND = "python -m benchmarks.probes.fit_prices --results benchmarks/results --traces DIR"
PARTS = ("rows", "tile_ends", "instances", "moved", "added")


def times(records: Records, case: Case, name: str) -> dict[tuple[int, int, int], float]:
    """Median microseconds by layer, micro-batch and rank."""
    rows = records.of(case.name, name)
    keys, number = np.unique(rows[["layer", "micro_batch", "rank"]], return_inverse=True)
    us = rank_times(rows)
    return {tuple(key): float(np.median(us[number == at])) for at, key in enumerate(keys.tolist())}


def ranks_of(records: Records, case: Case, setting: GpuSetting) -> list[tuple[list[float], float, float]]:
    """(PARTS, time without moves, time with them) of every rank that was run, over balanced rows and times."""
    (ours,) = (one for one in contenders(case, setting) if one.name == EQUILIBRA)
    homes = case.cluster.experts_per_rank(case.load.num_experts)
    still, moving = times(records, case, STILL_ONE), times(records, case, EQUILIBRA)
    even = np.median(list(times(records, case, BALANCED).values()))
    ran = {tuple(row) for row in records.of(case.name, EQUILIBRA)[["layer", "micro_batch", "rank", "rows"]].tolist()}
    found = []
    for layer, m in sorted({key[:2] for key in moving}):
        works = ours.works[case.layers.index(layer)][m]
        mean = float(np.mean([work.num_rows for work in works]))
        for rank, (work, move) in enumerate(zip(works, ours.moves(case.layers.index(layer), m), strict=True)):
            if (layer, m, rank, work.num_rows) not in ran:
                raise InputError(f"{case.name}: its records are of another plan; use the code of their commit")
            tile_ends = sum(-size % H200_KERNELS.tile_rows for size in work.sizes)
            moved = move.ahead + move.behind + move.returned
            counts = work.num_rows - mean, tile_ends, work.num_instances - homes, moved, sum(move.added)
            found.append(
                ([count / mean for count in counts], still[layer, m, rank] / even, moving[layer, m, rank] / even)
            )
    return found


def prices(records: Records, cases: list[Case], setting: GpuSetting) -> dict[str, Any]:
    """Fitted prices of one shape; each case has a constant of its own."""
    parts, took, number = [], [], []
    for at, case in enumerate(cases):
        for part, still, moving in ranks_of(records, case, setting):
            parts += [[*part[:3], 0.0, 0.0], part]
            took += [still, moving]
            number += [at, at]
    known = np.concatenate([np.array(parts), np.eye(len(cases))[number]], axis=1)
    found, *_ = np.linalg.lstsq(known, np.array(took), rcond=None)
    model = cases[0].model
    worth = found[2:5] / found[0] + np.array([H200_KERNELS.tile_rows / 3, 0.0, 0.0])
    us_per_mb = worth * (6 * model.expert_parameters / H200_KERNELS.tflops) / model.expert_bytes
    return {
        "shape": model.name,
        **{f"{name}_us_per_mb": round(float(us), 3)
           for name, us in zip(("hold", "move", "add"), us_per_mb, strict=True)},
        "fitted": {name: round(float(value), 2) for name, value in zip(PARTS, found, strict=False)},
        "left": round(float((np.array(took) - known @ found).std()), 4), "ranks": len(took) // 2,
    }  # fmt: skip


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--traces", required=True)
    parser.add_argument("--output", type=Path)
    parsed = parser.parse_args()
    known = argparse.Namespace(trace=None, traces=parsed.traces, model=None, hidden=None, ffn=None)
    setting = GpuSetting(paths=("device",))
    records = load_records(parsed.results / "gpu-records.npz")
    of_shape = defaultdict(list)
    for case in cases_for(routings_asked(known)[0], models_asked(known), list(RANKS), setting)[0]:
        if case.name in records.cases:
            of_shape[case.model.name].append(case)
    found = [prices(records, cases, setting) for cases in of_shape.values()]
    for one in found:
        print(json.dumps(one))
    if parsed.output:
        commit = json.loads((parsed.results / "gpu.json").read_text())["cases"][0]["measured_on"]["commit"]
        about = {"command": COMMAND, "about": f"measured: fitted to the records of the GPU bench of commit {commit}"}
        parsed.output.write_text(json.dumps({**about, "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
