"""The training bench: the gain of balancing in whole steps, and where their time goes, on two ranks of one core each.

From the times of each repeat, in which all contenders train on the same rollout:

    speedup_over_static           time(static) / time(equilibra), of the whole step and of log-prob and update alone
    share_of_balanced             time(balanced) / time(equilibra), of the same two: the share of balanced throughput
    planning_and_moving_share     (plan + move) / step of equilibra; the plan stage is everything before log-prob
    exposed_share                 time that the recorder saw as exposed (waiting for copies, moves) / step
    from_contiguous_share         planning and moving / step after contiguous homes: every possible home moves
    prepared_share                planning and moving / step if planned while rewards are computed: the added time
    shares                        every stage / step, of every contender
    static_imbalance, imbalance   slowest over mean rank, over layers and micro-batches: without and with balancing

The figures at the top are equilibra's; `moves_only` has those of equilibra-moves. A step is rollout, reward, plan,
move, log-prob, advantages, update and weights; every stage takes as long as on the slowest rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runtime.processes import cores_for_ranks, run_on_ranks
from benchmarks.suite import environment, spread
from benchmarks.train.setting import BALANCED, EQUILIBRA, MOVES, NAMES, PARTS, PLANNED, STAGES, STATIC, TrainSetting
from benchmarks.train.tables import section_rows
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.execute.group import ExpertGroup

NEEDED = ("torch", "transformers", "reasoning_gym")
LEARNING = ("logprob", "update")
Repeat = dict[str, Any]
Spread = dict[str, Any]


def measured(setting: TrainSetting, *, command: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the bench: figures, raw times and tables of them."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"the training bench needs {', '.join(missing)}: pip install 'equilibra[train]'")
    warnings = []
    if cores_for_ranks() is None:
        warnings.append("fewer than two cores: the ranks share one, so times say nothing about balance")
    for warning in warnings:
        tell(f"warning: {warning}")
    about = {**environment(), "load_average": [round(value, 2) for value in os.getloadavg()]}
    found = run_on_ranks(_measure, (setting,), tell, timeout_s=setting.timeout_s)
    about["torch"] = found.pop("torch")
    figures = figures_of(found["repeats"])
    section = {"command": command, "measured_on": about}
    rows = section_rows(figures, found, skew=setting.skew)
    return {
        **figures, "command": command, "settings": asdict(setting), "environment": about, "warnings": warnings,
        **found, "sections": {name: {**section, "rows": part} for name, part in rows.items()},
    }  # fmt: skip


def figures_of(repeats: list[Repeat]) -> dict[str, Any]:
    """All figures, from the seconds of the repeats."""
    every = {name: [repeat["contenders"][name] for repeat in repeats] for name in NAMES}
    return {
        **_gain(every, EQUILIBRA),
        "moves_only": _gain(every, MOVES),
        "shares": {
            name: {stage: spread(one["seconds"][stage] / _seconds(one) for one in steps) for stage in STAGES}
            for name, steps in every.items()
        },
        "step_seconds": {name: spread(_seconds(one) for one in steps) for name, steps in every.items()},
        "begin_seconds": {name: _begin(every[name]) for name in (STATIC, *PLANNED)},
        "others_share": spread(repeat["others_share"] for repeat in repeats),
    }


def _gain(every: dict[str, list[Repeat]], name: str) -> dict[str, Any]:
    """What a balanced contender gains and costs."""
    ours = every[name]
    return {
        "speedup_over_static": _ratios(every[STATIC], ours),
        "share_of_balanced": _ratios(every[BALANCED], ours),
        "static_imbalance": spread(one["static_imbalance"] for one in ours),
        "imbalance": spread(one["imbalance"] for one in ours),
        "planning_and_moving_share": spread(_seconds(one, ("plan", "move")) / _seconds(one) for one in ours),
        "from_contiguous_share": spread(one["from_contiguous"]["seconds"] / _seconds(one) for one in ours),
        "prepared_share": spread(one["prepared"]["exposed"] / _seconds(one) for one in ours),
        "exposed_share": spread(one["exposed_s"] / _seconds(one) for one in ours),
    }


def _begin(steps: list[Repeat]) -> dict[str, Spread]:
    """Seconds of everything before log-prob, and of its variants."""
    found = {part: spread(one["parts"][part] for one in steps) for part in PARTS}
    for variant in ("from_contiguous", "prepared"):
        for part in steps[0].get(variant, {}):
            found[f"{variant}_{part}"] = spread(one[variant][part] for one in steps)
    return found


def _ratios(slower: list[Repeat], faster: list[Repeat]) -> dict[str, Spread]:
    """Ratios of times within each repeat."""
    pairs = list(zip(slower, faster, strict=True))
    return {
        "step": spread(_seconds(one) / _seconds(other) for one, other in pairs),
        "logprob_and_update": spread(_seconds(one, LEARNING) / _seconds(other, LEARNING) for one, other in pairs),
    }


def _seconds(one: Repeat, stages: tuple[str, ...] = STAGES) -> float:
    return float(sum(one["seconds"][stage] for stage in stages))


def _measure(setting: TrainSetting, group: ExpertGroup, tell: Callable[[str], None]) -> dict[str, Any]:
    from benchmarks.train.model import write_model_folder  # noqa: PLC0415 - only ranks need torch
    from benchmarks.train.rank import measure  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="equilibra-bench-") as folder:
        write_model_folder(setting, Path(folder))
        return measure(setting, Path(folder), group, tell)
