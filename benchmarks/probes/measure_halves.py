"""Gradients of weights and rows with the last tiles of dx whole and in halves, in turn, beside what their schedule says.

    PYTHONPATH=src python benchmarks/probes/measure_halves.py --output FILE

Sizes are those of ranks of plans (routing of gpt-oss-20b and DeepSeek-V2-Lite) and of balanced ranks. From what halves
bring by the schedule and on the device follows what it costs to start with them: `start_steps`, in the schedule's unit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import measure_kernels
import numpy as np
import torch
from measure_kernels import DEVICE, Works, about, in_turn

from equilibra.execute.kernels import grouped
from equilibra.execute.kernels.grouped import Groups, Shares
from equilibra.execute.kernels.shares import Part
from equilibra.execute.moe.expert_math import ExpertParts

SIZES = [
    (8166, 8166), (9856, 6774), (12288, 4006), (4935, 10171, 218, 896), (2328, 863, 6400, 5068, 1275),
    (4079, 4080, 4079, 4080), (1822, 2024, 7936, 4753), (667, 412, 4900, 5050, 2636, 2304),
    (3072,) * 8, (5100, 4300, 3900, 3100, 2700, 2300, 1900, 1200, 640),
]  # fmt: skip
NEVER = 9.0
"""of HALF_COST: with it halves are chosen nowhere"""


def launches(sizes: tuple[int, ...], like: torch.Tensor, inner: int, half_cost: float) -> tuple[Shares, ...]:
    """With halves or without."""
    known, grouped.HALF_COST = grouped.HALF_COST, half_cost
    grouped._shared_out.cache_clear()
    Shares.of.cache_clear()
    found = Shares.of(grouped._share_task(Groups.of(sizes, DEVICE), like, inner, learned=(True, True)), DEVICE)
    grouped.HALF_COST = known
    return found


def scheduled(sizes: tuple[int, ...], width: int, inner: int, shares: tuple[Shares, ...]) -> float:
    """When the last program ends, of all launches, in steps of the inner dimension."""
    tile, end = grouped.WEIGHT, 0.0
    each = grouped._num_tiles(width, inner, tile), grouped._num_tiles(2 * inner, width, tile)
    costs = [max(-(-size // tile.bk), 1) * tile.bk + grouped.SUM_COST for size in sizes]
    whole = 2 * inner + grouped.STORE_COST
    half = int(2 * inner * grouped.HALF_COST) + grouped.STORE_COST
    for launch in shares:
        table, work = launch.shares.cpu().numpy().reshape(-1, 2 * len(Part)), launch.work.cpu().numpy()
        bounds = np.append(table[:, ::2].ravel(), work.size).reshape(-1)
        ends = np.zeros(len(table))
        for program in range(len(table)):
            for part in Part:
                at = program * len(Part) + part
                for number in work[bounds[at] : bounds[at + 1]]:
                    of_weights = part in (Part.DOWN, Part.GATE_UP)
                    ends[program] += (
                        costs[number // each[part - 1]] if of_weights else half if part is Part.HALVES else whole
                    )
        end += float(ends.max())
    return end


def measured(shape: str, sizes: tuple[int, ...]) -> dict[str, Any] | None:
    """One shape and one rank; nothing where the schedule ends sooner without halves."""
    width, inner, _ = measure_kernels.SHAPES[shape]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)

    rows, groups = sum(sizes), Groups.of(sizes, DEVICE)
    instances = [ExpertParts(random(2 * inner, width) * 0.02, random(width, inner) * 0.02) for _ in sizes]
    sums = [ExpertParts(*(torch.zeros_like(part, dtype=torch.float32) for part in parts[:2])) for parts in instances]
    values = random(rows, width), random(rows, inner), random(rows, 2 * inner), random(rows, width)
    dx = torch.empty_like(values[3])
    ways = {
        name: launches(sizes, values[0], inner, cost)
        for name, cost in (("whole", NEVER), ("halves", grouped.HALF_COST))
    }
    if not any(int(launch.shares.view(-1, 2 * len(Part))[:, -1].sum()) for launch in ways["halves"]):
        return None
    works: Works = {
        name: lambda shares=shares: grouped.weights_and_rows(
            shares, groups, values, instances, sums, slice(0, len(sizes)), dx
        )
        for name, shares in ways.items()
    }
    us = in_turn(works, repeats=30)
    steps = {name: scheduled(sizes, width, inner, shares) for name, shares in ways.items()}
    step_us = us["whole"] / steps["whole"]
    brought = {"by_schedule_us": (steps["whole"] - steps["halves"]) * step_us, "us": us["whole"] - us["halves"]}
    return {
        "shape": shape, "sizes": sizes, "whole_us": us["whole"], "halves_us": us["halves"],
        "brought_us": brought["us"], "brought_by_schedule_us": brought["by_schedule_us"],
        "start_steps": (brought["by_schedule_us"] - brought["us"]) / step_us,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args()
    result: dict[str, Any] = {**about("measure_halves"), "device": torch.cuda.get_device_name(), "cases": []}
    for shape in measure_kernels.SHAPES:
        for sizes in SIZES:
            found = measured(shape, sizes)
            if found is None:
                continue
            result["cases"].append(found)
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in found.items()}, flush=True)
        some = [case["start_steps"] for case in result["cases"] if case["shape"] == shape]
        print(shape, "start_steps", round(float(np.median(some))), flush=True)
        parsed.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
