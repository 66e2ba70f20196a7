"""A run folder: settings, results and events of one step under several planners. `equilibra report` reads it.

    RUN/run.json          settings, inputs, and the figures of each planner
    RUN/<planner>.npz     token counts, copies, times per layer and micro-batch, and events of that planner

Symbols: L layers, M micro-batches, R ranks, E experts, C standing copies, F flash copies, P passes through a layer.
Arrays are checked when they are read; pickled objects are refused. The folder appears when it is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_folder, read_arrays, read_values
from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.events.schema import Events

FORMAT = "equilibra run"
VERSION = 1
PASSES = ("log-prob forward", "update forward", "update backward")
"""passes of a step through every layer and micro-batch, in the order of `layer_us_PLM`"""


def columns_of_plan(plan: StepPlan, load: StepLoad) -> dict[str, Any]:
    """The fields of a PlannerRecord that come straight from a plan."""
    part, standing = plan.stages[Stage.UPDATE], plan.standing
    return {
        "expert_tokens_LME": load.expert_load().transpose(1, 0, 2).astype(np.int32),
        "home_of_expert_LE": plan.placement.home_of_expert,
        "flash_first_of_problem": part.first_of_problem,
        "flash_expert": part.expert,
        "flash_rank": part.rank,
        "flash_origin": part.origin,
        "flash_tokens": part.tokens_FR.sum(axis=1, dtype=np.int64).astype(np.int32),
        "standing_layer": standing.layer,
        "standing_expert": standing.expert,
        "standing_rank": standing.rank,
        "standing_tokens_CM": part.standing_tokens_CMR.sum(axis=2, dtype=np.int64).astype(np.int32),
        "bound_LM": plan.bound_LM,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannerRecord:
    """One planner's step. Copies are those of the update stage."""

    metrics: dict[str, float]
    """figures by name, which carries the unit"""
    memory: dict[str, float]
    """bytes on the rank that needs most, by purpose"""
    rank_tokens_LMR: NDArray[np.int32]
    """[L, M, R] (token, expert) pairs that each rank computes"""
    expert_tokens_LME: NDArray[np.int32]
    """[L, M, E] pairs of each expert"""
    home_of_expert_LE: NDArray[np.int32]
    """[L, E] home rank of each expert"""
    flash_first_of_problem: NDArray[np.int64]
    """[L * M + 1] flash copies of layer l and micro-batch m start at entry l * M + m"""
    flash_expert: NDArray[np.int32]
    """[F]"""
    flash_rank: NDArray[np.int32]
    """[F] rank that holds the copy"""
    flash_origin: NDArray[np.int32]
    """[F] rank it is copied from"""
    flash_tokens: NDArray[np.int32]
    """[F] pairs it serves"""
    standing_layer: NDArray[np.int32]
    """[C]"""
    standing_expert: NDArray[np.int32]
    """[C]"""
    standing_rank: NDArray[np.int32]
    """[C] rank that holds the copy"""
    standing_tokens_CM: NDArray[np.int32]
    """[C, M] pairs it serves in each micro-batch"""
    layer_us_PLM: NDArray[np.float32]
    """[P, L, M] time of each pass through each layer and micro-batch, microseconds"""
    bound_LM: NDArray[np.int64]
    """[L, M] lower bound of the slowest rank's pairs under any plan"""
    events: Events
    """events of micro-batch `run.about["window"]["micro_batch"]`, and those that happen once a step"""

    def __post_init__(self) -> None:
        tokens, home = self.rank_tokens_LMR, self.home_of_expert_LE
        if tokens.ndim != 3 or home.ndim != 2:
            raise InputError(f"rank tokens must be [L, M, R] and homes [L, E], not {tokens.shape} and {home.shape}")
        for name, (shape, below) in self._limits().items():
            array = getattr(self, name)
            if array.shape != shape:
                raise InputError(f"{name} must have shape {shape}, not {array.shape}")
            if array.dtype.kind not in ("f" if name == "layer_us_PLM" else "iu"):
                raise InputError(f"{name} cannot hold {array.dtype}")
            if array.size and not (array.min() >= 0 and array.max() < below):
                raise InputError(f"{name} must be from 0 to {below - 1}, not {array.min()} to {array.max()}")
        first = self.flash_first_of_problem
        if first[0] != 0 or first[-1] != self.flash_expert.size or (np.diff(first) < 0).any():
            raise InputError(f"flash_first_of_problem must rise from 0 to {self.flash_expert.size}")
        for name, value in (*self.metrics.items(), *self.memory.items()):
            if not isinstance(value, (int, float)) or not np.isfinite(value):
                raise InputError(f"{name} must be a finite number, not {value!r}")

    def _limits(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """The shape of every array, and what its values must be below."""
        (L, M, R), E, any_number = self.rank_tokens_LMR.shape, self.home_of_expert_LE.shape[1], 2**62
        F, C = self.flash_expert.size, self.standing_layer.size
        return {
            "rank_tokens_LMR": ((L, M, R), any_number), "expert_tokens_LME": ((L, M, E), any_number),
            "home_of_expert_LE": ((L, E), R), "flash_first_of_problem": ((L * M + 1,), any_number),
            "flash_expert": ((F,), E), "flash_rank": ((F,), R), "flash_origin": ((F,), R),
            "flash_tokens": ((F,), any_number), "standing_layer": ((C,), L), "standing_expert": ((C,), E),
            "standing_rank": ((C,), R), "standing_tokens_CM": ((C, M), any_number),
            "layer_us_PLM": ((len(PASSES), L, M), any_number), "bound_LM": ((L, M), any_number),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One step under several planners, whose names are file names."""

    about: dict[str, Any]
    """kind (simulated or measured), command, version, model, hardware, cluster, settings, inputs, window, warnings"""
    planners: dict[str, PlannerRecord] = field(default_factory=dict)
    """records by planner, in display order"""

    def __post_init__(self) -> None:
        for name in self.planners:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,99}", name):
                raise InputError(f"a planner cannot be named {name!r}: use letters, digits, dots and dashes")


def _array_names() -> list[str]:
    return [entry.name for entry in fields(PlannerRecord) if entry.name not in ("metrics", "memory", "events")]


def save_run(run: Run, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a run; the folder appears at `path` when it is complete."""
    path = Path(path)
    figures = {name: {"metrics": record.metrics, "memory": record.memory} for name, record in run.planners.items()}
    about = {**run.about, "format": FORMAT, "format_version": VERSION, "planners": figures}
    with atomic_folder(path, overwrite=overwrite, replaceable_if="run.json") as part:
        (part / "run.json").write_text(json.dumps(about, indent=1, allow_nan=False) + "\n")
        for name, record in run.planners.items():
            arrays = {array: getattr(record, array) for array in _array_names()}
            with (part / f"{name}.npz").open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, events=record.events.rows, **arrays)


def load_run(path: Path | str) -> Run:
    """Read a run; InputError if it is damaged or not a run folder."""
    path = Path(path)
    if not (path / "run.json").is_file():
        raise InputError(f"{path} is not a run folder (no run.json); make one with equilibra simulate --output {path}")
    about = read_values(path / "run.json")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"cannot read {path}: it is not an {FORMAT}")
    if (found := about.get("format_version")) != VERSION:
        raise InputError(f"{path} has version {found} of the run format, this program reads {VERSION}")
    for key in ("model", "hardware", "cluster", "settings"):
        if key in about and not isinstance(about[key], dict):
            raise InputError(f"cannot read {path}: {key} in run.json must be an object, not {about[key]!r}")
    try:
        records = about.pop("planners")
        planners = {name: _load_record(path / f"{Path(name).name}.npz", record) for name, record in records.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read {path}: run.json lacks {error}") from error
    return Run(about={key: about[key] for key in about if key not in ("format", "format_version")}, planners=planners)


def _load_record(path: Path, record: dict[str, Any]) -> PlannerRecord:
    found = read_arrays(path)
    try:
        arrays = {name: found[name] for name in _array_names()}
        events = Events(rows=found["events"])
        return _checked(PlannerRecord(metrics=record["metrics"], memory=record["memory"], events=events, **arrays))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"cannot read {path}: damaged or not a planner record ({error})") from error


def _checked(record: PlannerRecord) -> PlannerRecord:
    """The record, if its events have layers, micro-batches, ranks and experts of this step."""
    rows, (layers, micro_batches, ranks) = record.events.rows, record.rank_tokens_LMR.shape
    below = {"layer": layers, "micro_batch": micro_batches, "rank": ranks, "peer": ranks,
             "expert": record.home_of_expert_LE.shape[1]}  # fmt: skip
    for name in (*below, "tokens", "bytes"):
        least, most = -1 if name in below else 0, below.get(name, 2**62)
        if rows.size and not (rows[name].min() >= least and rows[name].max() < most):
            found = f"{rows[name].min()} to {rows[name].max()}"
            raise InputError(f"{name} of events must be from {least} to {most - 1}, not {found}")
    return record
