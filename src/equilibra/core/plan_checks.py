"""What must hold for a plan: shapes and ranges when it is made, exactness and slots against a load.

Symbols: M micro-batches, L layers, R ranks, E experts, C standing copies, F flash copies of a stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import PlanError
from equilibra.core.load import StepLoad

if TYPE_CHECKING:
    from equilibra.core.plan import StagePlan, StepPlan

__all__ = ["check_range", "check_same_length", "check_slots", "check_stage", "check_standing_slots", "freeze"]


def check_same_length(what: str, *arrays: NDArray[np.int32]) -> None:
    """Arrays that describe the same copies must be int32 of one length."""
    if any(array.shape != arrays[0].shape or array.ndim != 1 or array.dtype != np.int32 for array in arrays):
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise PlanError(f"the arrays of {what} must be int32 of one length, not {found}")


def check_range(what: str, array: NDArray[np.int32], end: int) -> None:
    """Numbers must be 0 to end - 1."""
    if array.size and not 0 <= array.min() <= array.max() < end:
        raise PlanError(f"{what} must be 0 to {end - 1}, not {array.min()} to {array.max()}")


def freeze(*arrays: NDArray[np.integer]) -> None:
    """A plan never changes once it is made, so its digest holds."""
    for array in arrays:
        array.flags.writeable = False


def check_stage(plan: StepPlan, stage: StagePlan, load: StepLoad) -> None:
    """Every (token, expert) pair is served exactly once, by an instance that exists."""
    num_micro_batches, num_layers, num_experts, num_ranks = plan.shape
    if stage.tokens_FR.size and stage.tokens_FR.min() < 0:
        raise PlanError("a flash copy serves a negative number of tokens")
    if stage.standing_tokens_CMR.size and stage.standing_tokens_CMR.min() < 0:
        raise PlanError("a standing copy serves a negative number of tokens")
    layer, m = np.divmod(stage.problem_of_copy(), num_micro_batches)
    left = load.tokens_MLER.astype(np.int64)
    rows = left.reshape(-1, num_ranks)  # (m, layer, expert) by source
    np.subtract.at(rows, (m * num_layers + layer) * num_experts + stage.expert, stage.tokens_FR)
    standing = plan.standing
    row_CM = np.arange(num_micro_batches) * num_layers * num_experts
    row_CM = row_CM + (standing.layer * num_experts + standing.expert)[:, None]
    np.subtract.at(rows, row_CM, stage.standing_tokens_CMR)
    if left.min() < 0:
        at = np.argwhere(left < 0)[0]
        raise PlanError(
            f"copies of layer {at[1]}, expert {at[2]} serve {-left[tuple(at)]} tokens more of source rank {at[3]} "
            f"than micro-batch {at[0]} has: the plan is for another load"
        )
    _check_instances(plan, stage, layer, m)


def _check_instances(plan: StepPlan, stage: StagePlan, layer: NDArray[np.int64], m: NDArray[np.int64]) -> None:
    """No expert twice on one rank, and every flash copy comes from where an instance is."""
    num_micro_batches, num_layers, num_experts, num_ranks = plan.shape
    standing, home = plan.standing, plan.placement.home_of_expert
    has_LER = np.zeros((num_layers, num_experts, num_ranks), np.bool_)
    has_LER[np.arange(num_layers)[:, None], np.arange(num_experts), home] = True
    has_LER[standing.layer, standing.expert, standing.rank] = True
    if np.count_nonzero(has_LER) != home.size + standing.num_copies:
        raise PlanError("a standing copy is on a rank that has its expert already")
    doubled = np.flatnonzero(has_LER[layer, stage.expert, stage.rank])
    if doubled.size:
        at = doubled[0]
        raise PlanError(f"layer {layer[at]}: rank {stage.rank[at]} has expert {stage.expert[at]} and gets a copy of it")
    orphaned = np.flatnonzero(~has_LER[layer, stage.expert, stage.origin])
    if orphaned.size:
        at = orphaned[0]
        raise PlanError(
            f"layer {layer[at]}: expert {stage.expert[at]} is copied from rank {stage.origin[at]}, not there"
        )
    key = ((layer * num_micro_batches + m) * num_experts + stage.expert) * num_ranks + stage.rank
    if np.unique(key).size != key.size:
        raise PlanError("a rank has two flash copies of the same expert in one micro-batch")


def check_slots(plan: StepPlan, stage: StagePlan, spare_slots: int) -> None:
    """No rank holds more flash copies at a time than it has spare slots."""
    num_ranks = plan.cluster.num_ranks
    used = np.bincount(stage.problem_of_copy() * num_ranks + stage.rank)
    if used.size and used.max() > spare_slots:
        raise PlanError(f"a rank needs {used.max()} spare slots, {spare_slots} are allowed")
    node_of_rank = plan.cluster.node_of_rank()
    abroad = np.flatnonzero(node_of_rank[stage.rank] != node_of_rank[stage.origin])
    if abroad.size:
        at = abroad[0]
        raise PlanError(
            f"a flash copy of expert {stage.expert[at]} leaves its node: {stage.origin[at]} to {stage.rank[at]}"
        )


def check_standing_slots(plan: StepPlan, standing_slots: int) -> None:
    """No node holds more standing copies of a layer than it has slots for."""
    node = plan.cluster.node_of_rank()[plan.standing.rank]
    used = np.bincount(plan.standing.layer * plan.cluster.num_nodes + node)
    if used.size and used.max() > standing_slots:
        raise PlanError(f"a node needs {used.max()} standing slots in one layer, {standing_slots} are allowed")
