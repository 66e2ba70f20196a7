"""The measured cost of a flash copy to a rank on a GPU besides its rows, for `benchmarks.gpu.contenders`.

    python -m benchmarks.probes.measure_prices --output FILE

A rank with one more copy, or with copies moving meanwhile, is compared in turn with the same rows on homes alone;
microseconds, medians of 10 differences, forward and backward.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.replay import Replay, Sizes
from benchmarks.gpu.work import STILL, Moves, RankWork
from benchmarks.suite import environment
from equilibra.core.model import MoEModel
from equilibra.cost.presets import load_model

HOMES = {"gpt-oss-20b": 4, "qwen3-30b-a3b": 4, "qwen3-235b-a22b": 8, "deepseek-v3": 8}
ROWS, OF_COPY = 16_384, 1_100
ROUNDS, FIRST = 12, 2


def work(homes: int, *, flash: int = 0, standing: int = 0) -> RankWork:
    """ROWS rows on homes and copies."""
    rest = ROWS - (flash + standing) * OF_COPY
    even = np.diff(np.arange(homes + 1) * rest // homes).tolist()
    return RankWork(staying=(*even, *[OF_COPY] * standing), flash=(OF_COPY,) * flash)


def jobs(homes: int) -> dict[str, tuple[RankWork, Moves]]:
    """The variants that are compared with `homes alone`."""
    alone = work(homes)
    return {
        "homes alone": (alone, STILL),
        "homes alone, again": (alone, STILL),
        "1 flash copy": (work(homes, flash=1), STILL),
        "2 flash copies": (work(homes, flash=2), STILL),
        "1 standing copy": (work(homes, standing=1), STILL),
        "1 copy moves beside": (alone, Moves(ahead=1, behind=1, returned=1)),
        "2 copies move beside": (alone, Moves(ahead=2, behind=2, returned=2)),
        "1 gradient is added": (alone, Moves(added=(1,))),
        "3 gradients are added": (alone, Moves(added=(1, 1, 1))),
        "3 gradients are added to one": (alone, Moves(added=(3,))),
    }


def measure(model: MoEModel, homes: int) -> dict[str, Any]:
    """Measured differences of one shape."""
    every = jobs(homes)
    replay = Replay(model, Sizes(ROWS, homes + 1, 2), device=torch.device("cuda"))
    us: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for turn in range(ROUNDS):
        for name, (one, moves) in every.items():
            (time,) = replay.run([one], [moves], "device", head_start_us=500.0)
            if turn >= FIRST:
                us[name].append((time.forward_us, time.backward_us))
    alone = np.array(us["homes alone"])
    more = {name: np.median(np.array(found) - alone, axis=0).round(1).tolist() for name, found in us.items()}
    return {
        "model": model.name, "expert_mb": model.expert_bytes * 1e-6, "rows": ROWS, "homes": homes,
        "homes_alone_us": np.median(alone, axis=0).round(1).tolist(), "more_us": more,
    }  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args()
    known = environment()
    command = "python -m benchmarks.probes.measure_prices --output FILE"
    about = {"command": command, "date": known["date"], "commit": known["commit"]}
    found: dict[str, Any] = {**about, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": []}
    for name, homes in HOMES.items():
        found["shapes"].append(measure(load_model(name), homes))
        print(json.dumps(found["shapes"][-1]), flush=True)
        torch.cuda.empty_cache()
    parsed.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
