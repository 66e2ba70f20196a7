"""One small GPTModel under plain Megatron and balanced, with copies prefetched and fetched on use.

Two ranks with a core each, taking turns in one run.

python -m benchmarks.megatron_steps [FOLDER]        # from the repository; writes FOLDER/megatron.md and .json

Routing is replayed, skewed and the same for all contenders; weights, data and optimizer are the same; losses are
compared. A step's time is that of the slower rank, from `begin` (which plans) to the end of the optimizer. gloo sends
with the cores that compute, so copies in transit slow down the layer that hides them: this bench can show what
prefetching costs, but hardly what it saves.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from tests.distributed.ranks import run_ranks

STEPS, WARM_UP = 12, 3
AHEAD, LATE = "Equilibra", "Equilibra, prefetch=False"
SIZES = {
    "HIDDEN": 256, "FFN": 1024, "SEQUENCE": 1024, "NUM_EXPERTS": 16, "TOP_K": 2, "VOCABULARY": 512, "SKEW": 3.0,
}  # fmt: skip


def steps(num_steps: int) -> dict[str, object]:
    """Seconds and losses of every step of each contender on this rank."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415
    from tests.megatron_core import models  # noqa: PLC0415
    from tests.megatron_core.gpt_runs import FULL, Training  # noqa: PLC0415

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    torch.set_num_threads(1)
    for name, value in SIZES.items():
        setattr(models, name, value)
    models.join(2)
    contenders = {
        "Megatron": Training(FULL),
        AHEAD: Training(FULL).balance("stay"),
        LATE: Training(FULL).balance("stay", prefetch=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_steps):
        for name in list(contenders)[number % 3 :] + list(contenders)[: number % 3]:
            dist.barrier()
            start = perf_counter()
            losses[name].append(contenders[name].step(number))
            took = torch.tensor([perf_counter() - start])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    planned, places = contenders[AHEAD].steps, contenders[AHEAD].balancer.layers
    return {
        "seconds": seconds,
        "losses": losses,
        "static_imbalance": statistics.mean(step.static_imbalance for step in planned),
        "planned_imbalance": statistics.mean(step.planned_imbalance for step in planned),
        "ahead": sum(place.num_ahead for place in places) / sum(place.num_ahead + place.num_late for place in places),
    }


def main() -> None:
    """Run and write."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    found = run_ranks(2, steps, STEPS + WARM_UP, timeout_s=900)[0]
    kept = {name: values[WARM_UP:] for name, values in found["seconds"].items()}
    apart = max(max(of_step) - min(of_step) for of_step in zip(*found["losses"].values(), strict=True))
    lines = [
        "# Megatron-Core, plain and balanced",
        "",
        (
            f"Measured {datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, two ranks with a "
            f"core each, gloo, float32; {STEPS} steps of each, taking turns; `python -m benchmarks.megatron_steps`."
        ),
        f"Model: {SIZES}, 2 layers, 3 micro-batches a step, full recompute, 2 spare slots.",
        "",
        "| | seconds a step, median (least to most) | slowest over mean rank |",
        "|---|---|---|",
    ]
    for name, mine in kept.items():
        imbalance = "static_imbalance" if name == "Megatron" else "planned_imbalance"
        lines.append(f"| {name} | {statistics.median(mine):.2f} ({min(mine):.2f} to {max(mine):.2f}) | "
                     f"{found[imbalance]:.2f} |")  # fmt: skip
    lines += ["", (f"Megatron takes {_ratio(kept['Megatron'], kept[AHEAD])}; without prefetch Equilibra takes "
               f"{_ratio(kept[LATE], kept[AHEAD])}. {found['ahead']:.0%} of the layers had their copies in transit "
               f"before they began. Losses differ by {apart:.1e} at most.")]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "megatron.md").write_text("\n".join(lines) + "\n")
    (folder / "megatron.json").write_text(json.dumps({**found, "sizes": SIZES}, indent=1) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


def _ratio(slower: list[float], faster: list[float]) -> str:
    ratios = [a / b for a, b in zip(slower, faster, strict=True)]
    return f"{statistics.median(ratios):.2f} times as long, median of pairs ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
