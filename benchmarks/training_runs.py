"""The embedded default run, seed by seed, and once with static placement: learning, duration and differences.

python benchmarks/training_runs.py [FOLDER]        # writes FOLDER/training.md and .json (benchmarks/results)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

SEEDS = (0, 1, 2)


def train(folder: Path, seed: int, planner: str) -> dict[str, Any]:
    """Run `equilibra train`, timed from start to end of the command."""
    command = ["equilibra", "train", "--seed", str(seed), "--planner", planner]
    start = perf_counter()
    subprocess.run(
        [sys.executable, "-m", *command, "--plain", "--output", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    seconds = perf_counter() - start
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    held_out = [line for line in lines if line["kind"] == "evaluation"]
    together = sum(step["seconds"] for step in steps)
    return {
        "command": " ".join(command), "seed": seed, "planner": planner, "seconds": round(seconds, 1),
        "held_out_first": held_out[0]["reward_held_out"], "held_out_last": held_out[-1]["reward_held_out"],
        "greedy_first": held_out[0]["reward_held_out_greedy"], "greedy_last": held_out[-1]["reward_held_out_greedy"],
        "imbalance_static": statistics.mean(step["imbalance_static"] for step in steps),
        "imbalance": statistics.mean(step["imbalance"] for step in steps),
        "step_seconds_median": statistics.median(step["seconds"] for step in steps),
        "shares": {
            name.removeprefix("seconds_"): sum(step.get(name, 0.0) for step in steps) / together
            for name in steps[0] if name.startswith("seconds_")
        },
        "mismatch_max": max(step["mismatch_max"] for step in steps),
        "steps": [{name: step[name] for name in ("reward", "loss", "kl", "entropy")} for step in steps],
    }  # fmt: skip


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any reward, loss, KL or entropy of any step."""
    pairs = zip(one["steps"], other["steps"], strict=True)
    return float(max(abs(a[name] - b[name]) for a, b in pairs for name in a))


def row(run: dict[str, Any]) -> str:
    """A row of the table."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in run["shares"].items() if share >= 0.01)
    return (
        f"| {run['seed']} | {run['planner']} | {run['held_out_first']:.3f} → {run['held_out_last']:.3f} | "
        f"{run['greedy_first']:.3f} → {run['greedy_last']:.3f} | {run['seconds']:.0f} | "
        f"{run['step_seconds_median']:.2f} | {run['imbalance_static']:.3f} | {run['imbalance']:.3f} | "
        f"{run['mismatch_max']:.1e} | {shares} |"
    )


def main(target: Path) -> None:
    """Run all; write both files after every run."""
    about = {
        "date": datetime.now(UTC).date().isoformat(), "command": "python benchmarks/training_runs.py",
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        .stdout.strip(),
        "cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(Path(folder) / "static", SEEDS[0], "static")]
        for seed in SEEDS:
            runs.append(train(Path(folder) / f"seed-{seed}", seed, "equilibra"))
            write(target, about, runs)


def write(target: Path, about: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Write the results so far: static first, then seed by seed."""
    difference = apart(runs[0], runs[1])
    last = [run["held_out_last"] for run in runs[1:]]
    grown = [run["held_out_last"] / run["held_out_first"] for run in runs[1:]]
    lines = [
        "# The embedded training run", "",
        (f"`{about['command']}`, date {about['date']}, commit {about['commit']}, {about['cores']} cores shared by 4 "
         f"ranks, load average before {about['load_average'][0]:.1f}. Measured."), "",
        ("| seed | planner | held-out reward | greedy | seconds, all | seconds per step | imbalance, static | "
         "imbalance | log-probability mismatch, largest | where a step's time goes |"),
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(run) for run in runs), "",
        (f"Held-out reward over {len(last)} seeds: {min(last):.3f} to {max(last):.3f} at the end, {min(grown):.1f} to "
         f"{max(grown):.1f} times that of the warmed-up model. Held-out problems never occur in training; answers are "
         "drawn at temperature 1, as in training. `greedy` takes the likeliest token instead. Most of what RL adds "
         "here is confidence: warm-up leaves the model unsure on purpose (smoothed targets)."), "",
        (f"`static` and `equilibra` with seed {SEEDS[0]}: rewards, losses, KL and entropy of all steps differ by at "
         f"most {difference:.1e} (float64)."), "",
        ("On one machine the four ranks share its cores, so balancing cannot make the run faster here: a waiting rank "
         "leaves its core to the others. `imbalance` is rows of the slowest rank over the mean, which is what separate "
         "machines would wait for."), "",
    ]  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    (target / "training.md").write_text("\n".join(lines))
    record = {"about": about, "difference_static_equilibra": difference, "runs": runs}
    (target / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results"))
