"""When each program of the gradients' launches ends each of its parts, by the device's clock, and the cost of tiles.

    python -m benchmarks.probes.measure_ends --output FILE

`gradients` is timed with a time stamp after every part, inserted into its source. Sizes are those of ranks of plans
(routing of gpt-oss-20b and DeepSeek-V2-Lite) and of balanced ranks. The parts' times give the costs that are constants
of `equilibra.execute.kernels.grouped`, in rows of a sum of weights. `idle`: the time a mean program waits for the last
one of its launch.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.probes import measure_kernels
from benchmarks.probes.measure_kernels import DEVICE, about
from equilibra.execute.kernels import ExpertParts, grouped, products
from equilibra.execute.kernels.grouped import Groups, Shares
from equilibra.execute.kernels.shares import Part

SIZES = [
    (8192, 8192), (9856, 6774), (4935, 10171, 218, 896), (2328, 863, 6400, 5068, 1275), (4096,) * 4,
    (1822, 2024, 7936, 4753), (667, 412, 4900, 5050, 2636, 2304), (3072,) * 8,
    (5100, 4300, 3900, 3100, 2700, 2300, 1900, 1200, 640),
]  # fmt: skip
REPEATS = 6
REST = 2_000_000
"""cycles before a launch, so that the device does not get hot"""


def with_stamps(folder: Path) -> ModuleType:
    """The kernels, with `gradients` changed to record the time before and after every part."""
    before, name, after = inspect.getsource(products).partition("@_once_per_shape\ndef gradients(")
    body, next_name, rest = after.partition("@_once_per_shape\ndef bias_gradient(")
    lines, stamps = [], 0
    for line in body.replace("shares, like,", "shares, like, stamps,", 1).split("\n"):
        if line.startswith("    share = shares"):
            lines.append("    stamps += tl.program_id(0) * 6")
            lines.append("    tl.store(stamps, globaltimer())")
        lines.append(line)
        if line.strip() == ")  # fmt: skip":
            stamps += 1
            lines.append(f"    tl.store(stamps + {stamps}, globaltimer())")
    if stamps != len(Part):
        raise ValueError(f"{stamps} parts found in the kernel, {len(Part)} expected: its source is not as it was")
    clock = "from triton.language.extra.cuda import globaltimer\n"
    path = folder / "products_with_stamps.py"
    before = before.replace("import triton\n", f"import triton\n{clock}", 1)
    path.write_text(before + name + "\n".join(lines) + next_name + rest)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stamped:
    """Launches the kernel and keeps the stamps of every launch."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - Triton's kernels have no type
        self.kernel = kernel
        self.found: list[torch.Tensor] = []

    def __getitem__(self, grid: tuple[int]) -> Any:  # noqa: ANN401
        def launch(*values: Any, **sizes: Any) -> None:  # noqa: ANN401
            stamps = torch.zeros(grid[0], len(Part) + 1, dtype=torch.int64, device=DEVICE)
            torch.cuda._sleep(REST)  # type: ignore[no-untyped-call]
            self.kernel[grid](*values, stamps=stamps, **sizes)
            self.found.append(stamps)

        return launch


def tiles_of(launch: Shares) -> dict[tuple[int, Part], NDArray[np.int32]]:
    """Tiles by program and part."""
    work, begins = launch.work.cpu().numpy(), launch.shares.view(-1, 2 * len(Part))[:, ::2].ravel().cpu().numpy()
    lists = np.split(work, begins[1:])
    return {(at // len(Part), Part(at % len(Part))): tiles for at, tiles in enumerate(lists) if tiles.size}


def measured(shape: str, sizes: tuple[int, ...], kernels: ModuleType) -> list[dict[str, Any]]:
    """For every launch: its end, the end of the mean program, and every program's parts."""
    width, inner, _ = measure_kernels.SHAPES[shape]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)

    rows, groups = sum(sizes), Groups.of(sizes, DEVICE)
    instances = [ExpertParts(random(2 * inner, width) * 0.02, random(width, inner) * 0.02) for _ in sizes]
    sums = [ExpertParts(*(torch.zeros_like(part, dtype=torch.float32) for part in parts[:2])) for parts in instances]
    values = random(rows, width), random(rows, inner), random(rows, 2 * inner), random(rows, width)
    launches = Shares.of(grouped._share_task(groups, values[0], inner, learned=(True, True)), DEVICE)
    stamped = Stamped(kernels.gradients)
    grouped._kernels()  # gives Triton its memory
    with patch.object(grouped, "_kernels", lambda: SimpleNamespace(gradients=stamped)):
        for _ in range(REPEATS):
            grouped.weights_and_rows(
                launches, groups, values, instances, sums, slice(0, len(sizes)), torch.empty_like(values[3])
            )
    torch.cuda.synchronize()
    tile = grouped.WEIGHT
    each = grouped._num_tiles(width, inner, tile), grouped._num_tiles(2 * inner, width, tile)
    found = []
    for at, launch in enumerate(launches):
        us = torch.stack(stamped.found[at :: len(launches)][1:]).cpu().numpy() / 1e3
        ends = np.median(us[:, :, -1] - us[:, :, 0].min(axis=1, keepdims=True), axis=0)
        took = np.median(np.diff(us, axis=2), axis=0)
        parts = []
        for (program, part), tiles in tiles_of(launch).items():
            of_weights = part in (Part.DOWN, Part.GATE_UP)
            summed = sum(-(-sizes[t // each[part - 1]] // tile.bk) * tile.bk for t in tiles) if of_weights else 0
            parts.append((part.name, len(tiles), summed, float(took[program, part])))
        found.append({"shape": shape, "sizes": sizes, "launch": at, "end_us": float(ends.max()),
                      "idle": 1 - float(ends.mean() / ends.max()), "parts": parts})  # fmt: skip
    return found


def costs(launches: list[dict[str, Any]], inner: int) -> dict[str, float]:
    """Costs of one shape, by least squares over its last launches."""
    by_part = defaultdict(list)
    for launch in launches:
        for name, *values in launch["parts"]:
            by_part["sums" if name in (Part.DOWN.name, Part.GATE_UP.name) else name].append(values)
    tiles, rows, us = np.array(by_part["sums"]).T
    (of_sum, of_row), *_ = np.linalg.lstsq(np.stack([tiles, rows], 1), us, rcond=None)
    found = {"us_per_1000_rows": 1000 * of_row, "sum_in_rows": of_sum / of_row}
    for name in (Part.ROWS_AFTER.name, Part.HALVES.name):
        if len(by_part[name]) > 1:
            tiles, _, us = np.array(by_part[name]).T
            (start, of_tile), *_ = np.linalg.lstsq(np.stack([np.ones_like(tiles), tiles], 1), us, rcond=None)
            found |= {f"{name.lower()}_tile_in_rows": of_tile / of_row, f"{name.lower()}_start_in_rows": start / of_row}
    return {"inner": 2 * inner} | {name: float(value) for name, value in found.items()}


def main() -> None:
    """Measure every shape; write after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args()
    result: dict[str, Any] = {**about("measure_ends"), "device": torch.cuda.get_device_name(), "costs": {}, "ends": []}
    with tempfile.TemporaryDirectory() as folder:
        kernels = with_stamps(Path(folder))
        for shape, (_, inner, _) in measure_kernels.SHAPES.items():
            found = [launch for sizes in SIZES for launch in measured(shape, sizes, kernels)]
            last = max(launch["launch"] for launch in found)
            result["costs"][shape] = costs([launch for launch in found if launch["launch"] == last], inner)
            result["ends"] += [{k: v for k, v in launch.items() if k != "parts"} for launch in found]
            print(shape, {name: round(value, 2) for name, value in result["costs"][shape].items()}, flush=True)
            parsed.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
