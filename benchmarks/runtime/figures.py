"""The runtime bench: the gain of executed plans, measured on two ranks of one core each.

Cases are real routing (or a named recording, or synthetic routing without any), run under every contender in turn and
in a plain layer. From the times of each repeat:

    share_of_balanced     time(forced-balanced) / time(equilibra): the share of the balanced throughput
    speedup_over_static   time(static) / time(equilibra)
    runtime_overhead      time(static) / time(plain) - 1; below 0 the runtime is faster
    static_imbalance      of rows, from the routing: slowest over mean rank. Its spread is over layers and
                          micro-batches, that of the others over repeats.

With several cases, the figures at the top are those of the case with the largest static imbalance.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.problems import static_imbalance
from benchmarks.runtime.case import CLUSTER, Case, Shape
from benchmarks.runtime.contenders import BALANCED, EPLB, EQUILIBRA, NAMES, PLAIN, STATIC
from benchmarks.runtime.processes import cores_for_ranks, run_on_ranks
from benchmarks.runtime.setting import SKEWED_FROM, RuntimeSetting
from benchmarks.suite import Row, Suite, environment, spread
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.execute.group import ExpertGroup

FIGURES = ("share_of_balanced", "speedup_over_static", "static_imbalance", "runtime_overhead")
SHARE_REACH, SPEEDUP_REACH, OVERHEAD_REACH = 0.95, 1.3, 0.03


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
        found = run_on_ranks(_measure, (case, shape), tell, timeout_s=shape.timeout_s)
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
    """Figures, setting and raw times of one case."""
    seconds = {name: np.array(times) for name, times in found["seconds"].items()}
    return {
        "case": case.name,
        "share_of_balanced": spread(seconds[BALANCED] / seconds[EQUILIBRA]),
        "speedup_over_static": spread(seconds[STATIC] / seconds[EQUILIBRA]),
        "static_imbalance": static_imbalance(case.load, CLUSTER.num_ranks),
        "runtime_overhead": spread(seconds[STATIC] / seconds[PLAIN] - 1),
        "speedup_of_eplb": spread(seconds[STATIC] / seconds[EPLB]),
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


def _figures_row(result: dict[str, Any]) -> Row:
    """A row of the first table."""
    row: Row = {"case": result["case"], "static_imbalance": result["static_imbalance"]["of_step"]}
    reaches = {
        "share_of_balanced": SHARE_REACH,
        "speedup_over_static": SPEEDUP_REACH if row["static_imbalance"] >= SKEWED_FROM else None,
        "runtime_overhead": OVERHEAD_REACH,
        "speedup_of_eplb": None,
    }
    for name, reach in reaches.items():
        found = result[name]
        row[name] = found["median"]
        row[f"{name}_spread"] = f"{found['low']:.3f} to {found['high']:.3f}"
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
    "figures": "A step: every micro-batch forward (log-prob), then forward and backward (update); float32; copies "
    "fetched anew in every step. Figures are medians over repeats of ratios within a repeat, contenders in turn; "
    "spreads are the least and the largest. `share_of_balanced`: against the same number of rows spread evenly over "
    "all experts. `runtime_overhead`: the runtime under the static plan against a plain all-to-all layer without a "
    "plan; below 0 the runtime is faster. `static_imbalance`: rows of slowest over mean ranks. `token_counts`: rows "
    "executed by each rank's experts, per stage, pass, layer and micro-batch of every timed step, compared with the "
    "simulated ones; the bench ends with an error unless they are equal. `others_share`: the largest share of a core "
    "that other programs had in a counted step.",
    "times": "`flash_copies`: in the log-prob + update stage of a step. `experts_share`: share of the step in expert "
    "compute, on the rank with most. eplb-oracle runs from its own homes; moving there is not charged.",
}
RUNTIME = Suite(
    name="runtime",
    title="Runtime bench",
    intro="`reach` columns are requirements; empty ones have none.",
    sections=dict.fromkeys(TITLES, lambda _setting: []),  # both tables are of one run: see `measured`
    titles=TITLES,
    notes=NOTES,
)


def _measure(case: Case, shape: Shape, group: ExpertGroup, tell: Callable[[str], None]) -> dict[str, Any]:
    from benchmarks.runtime.rank import measure  # noqa: PLC0415 - only ranks need torch

    return measure(case, shape, group, tell)
