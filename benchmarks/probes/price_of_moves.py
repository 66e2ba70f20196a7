"""What moves beside a layer costs its ranks, by regression over the ranks of a GPU bench.

    PYTHONPATH=src:. python benchmarks/probes/price_of_moves.py --results benchmarks/results --traces DIR [--output FILE]

Every rank's time with moves less its time without (medians over repeats) is fitted by so much for weights or a gradient
that its own copies move, and so much for a gradient that it adds. Plans are made anew, which takes the code that made
the records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from equilibra.bench.gpu.case import Case, cases_for
from equilibra.bench.gpu.contenders import EQUILIBRA, STILL_ONE, contenders
from equilibra.bench.gpu.records import Records, load_records, rank_times
from equilibra.bench.gpu.setting import RANKS, GpuSetting
from equilibra.cli.bench_gpu import _models, _routings


COMMAND = "PYTHONPATH=src:. python benchmarks/probes/price_of_moves.py --results benchmarks/results --traces DIR"


def times(records: Records, case: Case, name: str) -> dict[tuple[int, int, int], float]:
    """Median microseconds by layer, micro-batch and rank."""
    rows = records.of(case.name, name)
    keys, number = np.unique(rows[["layer", "micro_batch", "rank"]], return_inverse=True)
    us = rank_times(rows)
    return {tuple(key): float(np.median(us[number == at])) for at, key in enumerate(keys.tolist())}


def prices(records: Records, case: Case, setting: GpuSetting) -> dict[str, Any]:
    """Of one case."""
    (ours,) = (one for one in contenders(case, setting) if one.name == EQUILIBRA)
    moving, still = times(records, case, EQUILIBRA), times(records, case, STILL_ONE)
    counts, more_us = [], []
    for layer, m in sorted({key[:2] for key in moving}):
        for rank, move in enumerate(ours.moves(case.layers.index(layer), m)):
            counts.append((move.ahead + move.behind + move.returned, sum(move.added)))
            more_us.append(moving[layer, m, rank] - still[layer, m, rank])
    (moved, added), *_ = np.linalg.lstsq(np.array(counts, float), np.array(more_us), rcond=None)
    expert_mb = case.model.expert_bytes * 1e-6
    left = np.array(more_us) - np.array(counts) @ (moved, added)
    return {
        "case": case.name, "move_us_per_mb": round(moved / expert_mb, 3), "add_us_per_mb": round(added / expert_mb, 3),
        "left_us": round(float(left.std()), 1), "ranks": len(more_us),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--traces", required=True)
    parser.add_argument("--output", type=Path)
    parsed = parser.parse_args()
    known = argparse.Namespace(trace=None, traces=parsed.traces, model=None, hidden=None, ffn=None)
    setting = GpuSetting(paths=("device",))
    cases, _ = cases_for(_routings(known)[0], _models(known), list(RANKS), setting)
    records = load_records(parsed.results / "gpu-records.npz")
    found = [prices(records, case, setting) for case in cases if case.name in records.cases]
    for one in found:
        print(json.dumps(one))
    medians = {name: float(np.median([one[name] for one in found])) for name in ("move_us_per_mb", "add_us_per_mb")}
    print(json.dumps({"medians": medians}))
    if parsed.output:
        about = {"command": COMMAND, "about": "measured: fitted to the records of the GPU bench"}
        parsed.output.write_text(json.dumps({**about, "medians": medians, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
