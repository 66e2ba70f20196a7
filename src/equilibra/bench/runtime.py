"""The runtime bench: what plans gain when they are executed, measured on two ranks of one core each.

Cases: real routing (or a recording that is asked for, or synthetic routing where there is none), run under every
contender in turn and in a plain layer. From the times of each repeat:

    share_of_balanced     time(forced-balanced) / time(equilibra): the share of the balanced throughput
    speedup_over_static   time(static) / time(equilibra)
    runtime_overhead      time(static) / time(plain) - 1; below 0 where the runtime is the faster one
    static_imbalance      of rows, from the routing: the slowest rank over the mean rank. Its spread is that over
                          layers and micro-batches, that of the others is over repeats.

With several cases the figures at the top are those of the one with the largest static imbalance.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from statistics import median
from typing import Any

import numpy as np

from equilibra.bench.runtime_case import CLUSTER, Case, Select, Shape, case_of
from equilibra.bench.runtime_contenders import BALANCED, EPLB, EQUILIBRA, NAMES, PLAIN, STATIC
from equilibra.bench.runtime_processes import cores_for_ranks, run_on_ranks
from equilibra.bench.setting import Row
from equilibra.bench.suite import Suite, environment
from equilibra.core.errors import BudgetError, InputError
from equilibra.measure.imbalance import imbalance
from equilibra.trace.open import load_trace
from equilibra.trace.routing import Recording
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

__all__ = ["FIGURES", "RUNTIME", "RuntimeSetting", "cases_for", "measured"]

FIGURES = ("share_of_balanced", "speedup_over_static", "static_imbalance", "runtime_overhead")
SHARE_REACH, SPEEDUP_REACH, OVERHEAD_REACH, SKEWED_FROM = 0.95, 1.3, 0.03, 1.5
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file
MOST_BYTES = 4 << 30
"""of weights and gradients, for shapes that nobody asked for"""


@dataclass(frozen=True, kw_only=True)
class RuntimeSetting:
    """What to run; None: chosen for the recording."""

    tokens: int | None = None
    """of a micro-batch, both ranks together"""
    micro_batches: int = 2
    """of a step"""
    layers: int | None = None
    """MoE layers"""
    hidden: int | None = None
    """width of a token"""
    ffn: int | None = None
    """inner width of an expert"""
    repeats: int = 5
    """timed rounds"""
    spare_slots: int = 2
    """flash copies a rank can hold"""
    path: str | None = None
    """of flash copies; None: the host path where shared memory has room for it"""
    patience: int = 60
    """seconds per case for waiting until other programs are quiet and running disturbed steps again"""
    seed: int = 0
    """of weights and hidden states"""
    quick: bool = False
    """small: to see that it runs, not to report"""

    def shape_for(self, case: Case) -> Shape:
        """The layer's widths: as asked, or as large as memory allows."""
        hidden, ffn = self.hidden or (64 if self.quick else 512), self.ffn or (64 if self.quick else 512)
        experts = case.load.num_experts * case.load.num_layers
        num_bytes = 3 * hidden * ffn * 4 * experts * 3  # weights, gradients, and once more to compare gradients
        while self.hidden is None and self.ffn is None and num_bytes > MOST_BYTES and hidden > 64:
            hidden, ffn, num_bytes = hidden // 2, ffn // 2, num_bytes // 4
        free = _free_bytes()
        if free is not None and num_bytes > free:
            raise BudgetError(
                f"{experts} experts of {hidden} x {ffn} need {num_bytes / 2**30:.1f} GiB on both ranks, "
                f"{free / 2**30:.1f} GiB are free: use smaller --hidden, --ffn or --layers"
            )
        path = self.path or _path_for(case, self.spare_slots, expert_bytes=3 * hidden * ffn * 4)
        return Shape(
            hidden=hidden, ffn=ffn, spare_slots=self.spare_slots, path=path, repeats=self.repeats,
            patience_s=self.patience, seed=self.seed,
        )  # fmt: skip


def _path_for(case: Case, spare_slots: int, *, expert_bytes: int) -> str:
    """The host path, unless /dev/shm is too small for the most that it may hold (docker gives it 64 MiB)."""
    copies = CLUSTER.num_ranks * spare_slots
    published = case.load.num_layers * min(case.load.num_experts, case.load.num_micro_batches * copies)
    room = disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return "host" if (published + 2 * copies) * expert_bytes < room else "collective"


def _free_bytes() -> int | None:
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def cases_for(
    setting: RuntimeSetting, *, trace: Path | None, select: Select, traces: Path | None
) -> tuple[list[Case], list[str]]:
    """The recording that is asked for, or those of a folder, or synthetic routing; and what is left out."""
    if trace is not None:
        return [_case(setting, load_trace(trace), trace.name.removesuffix(trace.suffix), select)], []
    cases, left_out = [], []
    for name, selects in (
        ("dsv2-lite-law", [Select.EVEN]),
        ("gpt-oss-20b", [Select.EVEN, Select.SKEWED]),
    ):
        if traces is None or not (traces / f"{name}.npz").is_file():
            left_out.append(name)
            continue
        recording = load_trace(traces / f"{name}.npz")
        cases += [_case(setting, recording, name, select) for select in selects]
    if traces is not None and not cases:
        raise InputError(
            f"{traces} has none of {', '.join(f'{name}.npz' for name in left_out)}; name a file with --trace"
        )
    if not cases:
        cases.append(_case(setting, _synthetic(0.7), "synthetic", Select.EVEN))
    if not any(_static_imbalance(case)["of_step"] >= SKEWED_FROM for case in cases):
        cases.append(_case(setting, _synthetic(2.5), "synthetic skew", Select.SKEWED))
    return cases, left_out


def _synthetic(skew: float) -> Recording:
    """Routing in the shape of DeepSeek-V2-Lite; its popularity skew is what the name of the case says."""
    size = SynthShape(num_prompts=24, answers_per_prompt=4, num_layers=4, num_experts=64, top_k=6)
    return synthesize(size, SynthKnobs(popularity_skew=skew, median_length=300.0, max_length=1000), seed=1)


def _case(setting: RuntimeSetting, recording: Recording, name: str, select: Select) -> Case:
    """The wanted number of micro-batches, as large as asked for or as the recording allows."""
    known = recording.num_tokens - recording.tokens_without_routing
    tokens = setting.tokens or max(min(256 if setting.quick else 4096, known // setting.micro_batches), 2)
    layers = setting.layers or (min(2, recording.num_layers) if select is Select.EVEN else 1)
    return case_of(
        recording, name, tokens=tokens, num_micro_batches=setting.micro_batches, num_layers=layers, select=select
    )


def measured(
    setting: RuntimeSetting, cases: list[Case], *, command: str, left_out: list[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run all cases: figures, raw times and tables of them."""
    if find_spec("torch") is None:
        raise InputError("the runtime bench needs PyTorch: pip install 'equilibra[torch]'")
    if setting.repeats < 1:
        raise InputError(f"at least one repeat is needed, not {setting.repeats}")
    warnings = []
    if cores_for_ranks() is None:
        warnings.append("fewer than two cores: the ranks share one, so times say nothing about balance")
    about = {**environment(), "load_average": [round(value, 2) for value in os.getloadavg()]}
    for warning in warnings:
        tell(f"warning: {warning}")
    results = []
    for case in cases:
        shape = setting.shape_for(case)
        tell(f"{case.name}: {case.num_tokens} tokens, layers {case.layers}, experts of {shape.hidden} x {shape.ffn}")
        found = run_on_ranks(case, shape, tell)
        about["torch"] = found.pop("torch")
        results.append(_result(case, shape, found))
    headline = max(results, key=lambda result: result["static_imbalance"]["of_step"])
    section = {"command": command, "measured_on": about}
    return {
        **{name: headline[name] for name in ("case", *FIGURES)},
        "command": command,
        "cases": results,
        "environment": about,
        "warnings": warnings,
        "left_out": left_out,
        "sections": {
            "figures": {**section, "rows": [_figures_row(result) for result in results]},
            "times": {**section, "rows": [row for result in results for row in _times_rows(result)]},
        },
    }


def _result(case: Case, shape: Shape, found: dict[str, Any]) -> dict[str, Any]:
    """One case: figures, what was run, raw times."""
    seconds = {name: np.array(times) for name, times in found["seconds"].items()}
    return {
        "case": case.name,
        "share_of_balanced": _spread(seconds[BALANCED] / seconds[EQUILIBRA]),
        "speedup_over_static": _spread(seconds[STATIC] / seconds[EQUILIBRA]),
        "static_imbalance": _static_imbalance(case),
        "runtime_overhead": _spread(seconds[STATIC] / seconds[PLAIN] - 1),
        "speedup_of_eplb": _spread(seconds[STATIC] / seconds[EPLB]),
        "token_counts_equal": True,  # the ranks compare after every step, and end with an error otherwise
        "counts_compared": found["counts_compared"],
        "settings": {
            **asdict(shape),
            "ranks": CLUSTER.num_ranks,
            "tokens": case.num_tokens,
            "micro_batches": case.load.num_micro_batches,
            "layers": case.layers,
            "experts": case.load.num_experts,
            "top_k": case.top_k,
            "rows": int(case.load.tokens_MLER.sum()),
            "notes": case.notes,
        },
        **{
            name: found[name] for name in ("experts_share", "others_share", "rates", "largest_difference", "contenders")
        },
        "seconds": found["seconds"],
    }


def _spread(values: Any) -> dict[str, Any]:  # noqa: ANN401
    """Median, least and largest, and all of them."""
    numbers = [float(value) for value in values]
    return {"median": median(numbers), "low": min(numbers), "high": max(numbers), "repeats": numbers}


def _static_imbalance(case: Case) -> dict[str, float]:
    """Of contiguous homes, over layers and micro-batches; and of the step: what the slowest ranks compute together."""
    load_MLE = case.load.expert_load()
    load_MLR = load_MLE.reshape(*load_MLE.shape[:2], CLUSTER.num_ranks, -1).sum(axis=3)
    every = imbalance(load_MLR)
    of_step = load_MLR.max(axis=2).sum() / load_MLR.mean(axis=2).sum()
    return {
        "median": float(np.median(every)), "low": float(every.min()), "high": float(every.max()),
        "of_step": float(of_step),
    }  # fmt: skip


def _figures_row(result: dict[str, Any]) -> Row:
    """A line of the first table."""
    row: Row = {"case": result["case"], "static_imbalance": result["static_imbalance"]["of_step"]}
    reaches = {
        "share_of_balanced": SHARE_REACH,
        "speedup_over_static": SPEEDUP_REACH if row["static_imbalance"] >= SKEWED_FROM else None,
        "runtime_overhead": OVERHEAD_REACH,
        "speedup_of_eplb": None,
    }
    for name, reach in reaches.items():
        spread = result[name]
        row[name] = spread["median"]
        row[f"{name}_spread"] = f"{spread['low']:.3f} to {spread['high']:.3f}"
        if name != "speedup_of_eplb":
            row[f"{name}_reach"] = reach
    row["others_share"] = result["others_share"]["high"]
    row["token_counts"] = f"equal ({result['counts_compared']})"
    return row


def _times_rows(result: dict[str, Any]) -> list[Row]:
    """Lines of the second table."""
    plans = {plan["contender"]: plan for plan in result["contenders"]}
    rows = []
    for name in (*NAMES, PLAIN):
        times = result["seconds"][name]
        row: Row = {
            "case": result["case"], "contender": name, "seconds_median": median(times),
            "seconds_spread": f"{min(times):.3f} to {max(times):.3f}",
            "tokens_per_s": round(result["settings"]["tokens"] / median(times)),
        }  # fmt: skip
        if name in plans:
            row["imbalance"] = plans[name]["imbalance"]
            row["flash_copies"] = " + ".join(str(count) for count in plans[name]["flash_copies"].values())
            row["standing_copies"] = plans[name]["standing_copies"]
            row["experts_share"] = result["experts_share"][name]
        rows.append(row)
    return rows


TITLES = {
    "figures": "Two ranks of one core each, executed (measured)",
    "times": "A step of every contender (measured)",
}
NOTES = {
    "figures": "A step: every micro-batch forward (recompute), then forward and backward (update); float32; copies "
    "fetched anew in every step. Medians over repeats of ratios inside one repeat, contenders in turn; spreads are the "
    "least and the largest. `share_of_balanced`: against the same number of rows spread evenly over all experts. "
    "`runtime_overhead`: the runtime with the static plan against a plain all-to-all layer without a plan; below 0 the "
    "runtime is faster. `static_imbalance`: rows of the slowest ranks over mean ranks. `token_counts`: the rows that "
    "each rank's experts executed, per stage, pass, layer and micro-batch of every timed step, compared with the "
    "simulated ones: the bench ends with an error unless they are equal. `others_share`: the most that other programs "
    "had of a core in a step that counts.",
    "times": "`flash_copies`: in the recompute + update stage of a step. `experts_share`: part of the step that "
    "experts compute, on the rank where it is most. eplb-oracle runs from its own homes: moving there is not charged.",
}
RUNTIME = Suite(
    name="runtime",
    title="Runtime bench",
    intro="`reach` columns are what was asked for; empty ones have no requirement.",
    sections=dict.fromkeys(TITLES, lambda _setting: []),  # both tables are of one run: see `measured`
    titles=TITLES,
    notes=NOTES,
)
