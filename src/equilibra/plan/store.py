"""Plans on disk: one .npz file each, checked against the plan's digest when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_file, read_arrays
from equilibra.core.errors import EquilibraError, InputError
from equilibra.core.load import Schedule
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import STAGE_ARRAYS, Stage, StagePlan, StandingCopies, StepPlan

__all__ = ["load_plan", "save_plan"]

FORMAT = "equilibra step plan"
VERSION = 2


def save_plan(plan: StepPlan, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a plan atomically."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "planner": plan.planner,
        "num_nodes": plan.cluster.num_nodes,
        "ranks_per_node": plan.cluster.ranks_per_node,
        "ranks_per_sequence": plan.schedule.ranks_per_sequence if plan.schedule else 1,
        "digest": plan.digest,
    }
    header = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with atomic_file(Path(path), overwrite=overwrite) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, about=header, **plan.arrays())


def load_plan(path: Path | str) -> StepPlan:
    """Read a plan; InputError if it is damaged, of another format, or does not match its digest."""
    path = Path(path)
    arrays = read_arrays(path)
    about = _about(path, arrays.pop("about", None))
    try:
        plan = _plan(about, arrays)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, EquilibraError) as error:
        raise InputError(f"cannot read {path}: its arrays are not a valid plan ({error})") from error
    if plan.digest != about.get("digest"):
        raise InputError(f"cannot use {path}: its digest is {plan.digest}, but the file says {about.get('digest')}")
    return plan


def _about(path: Path, header: NDArray[Any] | None) -> dict[str, Any]:
    try:
        about = json.loads(b"{}" if header is None else header.tobytes())
    except (ValueError, RecursionError):
        about = {}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"cannot read {path}: it is not an {FORMAT}")
    if about.get("version") != VERSION:
        raise InputError(f"{path} has version {about.get('version')} of the plan format, this program reads {VERSION}")
    return about


def _plan(about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> StepPlan:
    cluster = Cluster(num_nodes=about["num_nodes"], ranks_per_node=about["ranks_per_node"])
    bound_LM = arrays["bound_LM"]
    stages = {stage: StagePlan(**{name: arrays[f"{stage}_{name}"] for name in STAGE_ARRAYS}) for stage in Stage}
    schedule = None
    if "micro_batch_of_sequence" in arrays:
        schedule = Schedule(
            micro_batch_of_sequence=arrays["micro_batch_of_sequence"],
            rank_of_sequence=arrays["rank_of_sequence"],
            num_micro_batches=int(bound_LM.shape[1]),
            ranks_per_sequence=int(about.get("ranks_per_sequence", 1)),
            mini_batch_of_micro_batch=arrays.get("mini_batch_of_micro_batch"),
        )
    return StepPlan(
        planner=about["planner"],
        placement=Placement(home_of_expert=arrays["home_of_expert"], cluster=cluster),
        previous=Placement(home_of_expert=arrays["previous_home_of_expert"], cluster=cluster),
        standing=StandingCopies(
            layer=arrays["standing_layer"], expert=arrays["standing_expert"], rank=arrays["standing_rank"]
        ),
        stages=stages,
        bound_LM=bound_LM,
        schedule=schedule,
    )
