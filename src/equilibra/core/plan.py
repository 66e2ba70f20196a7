"""StepPlan: everything that is decided before a step, and its parts: standing copies, and each stage's flash copies.

Symbols: M micro-batches, L layers, R ranks, E experts, C standing copies, F flash copies of a stage.

A plan lists the copies and how many tokens of each source rank each copy serves. The home of an expert serves the
rest, so every token is served exactly once unless a copy gets more tokens of a (source, expert) than there are.
`StepPlan.check` verifies that, and the slots, against a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import Schedule, StepLoad
from equilibra.core.placement import Cluster, Migration, Placement
from equilibra.core.visit import Stage, Visit, VisitKey

__all__ = ["GroupPlan", "Stage", "StagePlan", "StandingCopies", "StepPlan"]

STAGE_ARRAYS = ("first_of_problem", "expert", "rank", "origin", "tokens_FR", "standing_tokens_CMR")
"""arrays of a StagePlan, in the order of the digest"""


def check_same_length(what: str, *arrays: NDArray[np.int32]) -> None:
    """Raise PlanError unless arrays that describe the same copies are int32 of one length."""
    if any(array.shape != arrays[0].shape or array.ndim != 1 or array.dtype != np.int32 for array in arrays):
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise PlanError(f"the arrays of {what} must be int32 of one length, not {found}")


def check_range(what: str, array: NDArray[np.int32], end: int) -> None:
    """Raise PlanError unless numbers are 0 to end - 1."""
    if array.size and not 0 <= array.min() <= array.max() < end:
        raise PlanError(f"{what} must be 0 to {end - 1}, not {array.min()} to {array.max()}")


def freeze(*arrays: NDArray[np.integer]) -> None:
    """Make arrays read-only: the digest of a plan holds as long as the plan."""
    for array in arrays:
        array.flags.writeable = False


@dataclass(frozen=True, kw_only=True, eq=False)
class StandingCopies:
    """Copies that stay for the whole step, sorted by layer, expert and rank."""

    layer: NDArray[np.int32]
    """[C]"""
    expert: NDArray[np.int32]
    """[C]"""
    rank: NDArray[np.int32]
    """[C] the rank that holds it"""

    def __post_init__(self) -> None:
        check_same_length("standing copies", self.layer, self.expert, self.rank)
        freeze(self.layer, self.expert, self.rank)

    @property
    def num_copies(self) -> int:
        return int(self.layer.size)

    @classmethod
    def none(cls) -> StandingCopies:
        empty = np.zeros(0, np.int32)
        return cls(layer=empty, expert=empty, rank=empty)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePlan:
    """Flash copies of every layer and micro-batch of one stage, and the tokens that all copies serve."""

    first_of_problem: NDArray[np.int64]
    """[L * M + 1] flash copies of layer l and micro-batch m are those from entry l * M + m on"""
    expert: NDArray[np.int32]
    """[F]"""
    rank: NDArray[np.int32]
    """[F] the rank whose spare slot holds it"""
    origin: NDArray[np.int32]
    """[F] the rank it is copied from: the home, or a standing copy of the same node"""
    tokens_FR: NDArray[np.int32]
    """[F, R] tokens of each source that each flash copy serves"""
    standing_tokens_CMR: NDArray[np.int32]
    """[C, M, R] tokens of each source that each standing copy serves in each micro-batch"""

    def __post_init__(self) -> None:
        check_same_length("flash copies", self.expert, self.rank, self.origin)
        first, tokens, standing = self.first_of_problem, self.tokens_FR, self.standing_tokens_CMR
        rises = first.ndim == 1 and first.size > 1 and not (np.diff(first) < 0).any()
        if not rises or first[0] != 0 or first[-1] != self.num_copies:
            raise PlanError(f"first_of_problem must rise from 0 to the {self.num_copies} flash copies")
        if tokens.ndim != 2 or len(tokens) != self.num_copies or standing.ndim != 3:
            raise PlanError(f"tokens of {self.num_copies} flash copies cannot be {tokens.shape} and {standing.shape}")
        if tokens.dtype != np.int32 or standing.dtype != np.int32:
            raise PlanError(f"tokens must be int32, not {tokens.dtype} and {standing.dtype}")
        freeze(first, self.expert, self.rank, self.origin, tokens, standing)

    @property
    def num_copies(self) -> int:
        return int(self.expert.size)

    def problem_of_copy(self) -> NDArray[np.int64]:
        """[F] l * M + m of each flash copy."""
        return np.repeat(np.arange(self.first_of_problem.size - 1), np.diff(self.first_of_problem))

    def on_links(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[L * M, R] flash copies that each rank receives, and that each rank sends."""
        num_problems, num_ranks = self.first_of_problem.size - 1, self.tokens_FR.shape[1]
        first, size = self.problem_of_copy() * num_ranks, num_problems * num_ranks
        received, sent = (np.bincount(first + ranks, minlength=size) for ranks in (self.rank, self.origin))
        return received.reshape(num_problems, num_ranks), sent.reshape(num_problems, num_ranks)

    def standing_in_use(self, standing: StandingCopies) -> NDArray[np.int64]:
        """[L * M, R] standing copies with tokens that each rank holds."""
        num_micro_batches, num_ranks = self.standing_tokens_CMR.shape[1:]
        copy, micro_batch = np.nonzero(self.standing_tokens_CMR.any(axis=2))
        held_PR = np.zeros((self.first_of_problem.size - 1, num_ranks), np.int64)
        np.add.at(held_PR, (standing.layer[copy] * num_micro_batches + micro_batch, standing.rank[copy]), 1)
        return held_PR

    def rank_rows(
        self, load_MLE: NDArray[np.int64], home_LE: NDArray[np.int32], standing: StandingCopies
    ) -> NDArray[np.int64]:
        """[L, M, R] (token, expert) pairs that each rank computes under a load."""
        num_micro_batches, num_layers, _ = load_MLE.shape
        num_ranks = self.tokens_FR.shape[1]
        rows = np.zeros(num_layers * num_micro_batches * num_ranks, np.int64)
        first_LM = np.arange(0, rows.size, num_ranks).reshape(num_layers, num_micro_batches)
        np.add.at(rows, first_LM[:, :, None] + home_LE[:, None, :], load_MLE.transpose(1, 0, 2))
        problem, served = self.problem_of_copy(), self.tokens_FR.sum(axis=1, dtype=np.int64)
        np.subtract.at(rows, problem * num_ranks + home_LE[problem // num_micro_batches, self.expert], served)
        np.add.at(rows, problem * num_ranks + self.rank, served)
        first_CM, served_CM = first_LM[standing.layer], self.standing_tokens_CMR.sum(axis=2, dtype=np.int64)
        np.subtract.at(rows, first_CM + home_LE[standing.layer, standing.expert][:, None], served_CM)
        np.add.at(rows, first_CM + standing.rank[:, None], served_CM)
        return rows.reshape(num_layers, num_micro_batches, num_ranks)

    @classmethod
    def without_flash(cls, standing_tokens_CMR: NDArray[np.int32], num_layers: int = 1) -> StagePlan:
        """Only homes and standing copies serve tokens."""
        _, num_micro_batches, num_ranks = standing_tokens_CMR.shape
        none, first = np.zeros(0, np.int32), np.zeros(num_layers * num_micro_batches + 1, np.int64)
        return cls(
            first_of_problem=first, expert=none, rank=none, origin=none, tokens_FR=np.zeros((0, num_ranks), np.int32),
            standing_tokens_CMR=standing_tokens_CMR,
        )  # fmt: skip

    @classmethod
    def joined(cls, layers: Sequence[StagePlan]) -> StagePlan:
        num = np.concatenate([np.diff(layer.first_of_problem) for layer in layers])
        parts = {name: np.concatenate([getattr(layer, name) for layer in layers]) for name in STAGE_ARRAYS[1:]}
        return cls(first_of_problem=np.concatenate([[0], np.cumsum(num)]).astype(np.int64), **parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The plan of one step."""

    planner: str
    """name of the planner"""
    placement: Placement
    """homes during the step"""
    previous: Placement
    """homes before the step"""
    standing: StandingCopies
    stages: dict[Stage, StagePlan]
    """flash copies and splits; both stages may be the same object"""
    bound_LM: NDArray[np.int64]
    """[L, M] lower bound of the slowest rank's tokens under any plan"""
    schedule: Schedule | None = None
    """micro-batch and rank of every sequence, if the planner packed them"""

    def __post_init__(self) -> None:
        if set(self.stages) != set(Stage):
            raise PlanError(f"a plan needs the stages {', '.join(Stage)}, not {', '.join(self.stages)}")
        if self.bound_LM.ndim != 2 or len(self.bound_LM) != self.num_layers:
            raise PlanError(f"bounds of {self.num_layers} layers must be [layers, M], not {self.bound_LM.shape}")
        num_micro_batches, num_layers, num_experts, num_ranks = self.shape
        standing = self.standing
        check_range("layers of standing copies", standing.layer, num_layers)
        every: list[StandingCopies | StagePlan] = [standing, *self.stages.values()]
        for copies in every:
            check_range("experts of copies", copies.expert, num_experts)
            check_range("ranks of copies", copies.rank, num_ranks)
        for stage in self.stages.values():
            check_range("ranks that flash copies come from", stage.origin, num_ranks)
            shapes = stage.first_of_problem.size - 1, stage.tokens_FR.shape[1], stage.standing_tokens_CMR.shape
            required = num_layers * num_micro_batches, num_ranks, (standing.num_copies, num_micro_batches, num_ranks)
            if shapes != required:
                raise PlanError(f"a stage for (problems, ranks, standing tokens) {shapes} is in a plan for {required}")
        freeze(self.bound_LM, self.placement.home_of_expert, self.previous.home_of_expert)

    @property
    def cluster(self) -> Cluster:
        return self.placement.cluster

    @property
    def num_layers(self) -> int:
        return self.placement.num_layers

    @property
    def num_micro_batches(self) -> int:
        return int(self.bound_LM.shape[1])

    @property
    def migration(self) -> Migration:
        return Migration(before=self.previous, after=self.placement)

    def without_flash(self) -> StepPlan:
        """The same homes and standing copies, and no flash copies."""
        stages = {
            stage: StagePlan.without_flash(part.standing_tokens_CMR, self.num_layers)
            for stage, part in self.stages.items()
        }
        return replace(self, stages=stages)

    def rank_load(self, load: StepLoad, stage: Stage = Stage.UPDATE) -> NDArray[np.int64]:
        """[L, M, R] tokens that each rank computes."""
        if load.tokens_MLER.shape != self.shape:
            raise InputError(f"a plan for loads of shape {self.shape} was given loads of {load.tokens_MLER.shape}")
        return self.stages[stage].rank_rows(load.expert_load(), self.placement.home_of_expert, self.standing)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(M, L, E, R) of the loads that the plan is for."""
        return (self.num_micro_batches, self.num_layers, self.placement.num_experts, self.cluster.num_ranks)

    @cached_property
    def _visits(self) -> dict[VisitKey, Visit]:
        return {}

    def visit(self, stage: Stage, micro_batch: int, layer: int) -> Visit:
        """One layer of one micro-batch in one stage, made once."""
        key = VisitKey(stage, micro_batch, layer)
        if key not in self._visits:
            self._visits[key] = self._visit(key)
        return self._visits[key]

    def _visit(self, key: VisitKey) -> Visit:
        part, standing = self.stages[key.stage], self.standing
        problem = key.layer * self.num_micro_batches + key.micro_batch
        flash = np.arange(part.first_of_problem[problem], part.first_of_problem[problem + 1])
        flash = flash[np.lexsort((part.expert[flash], part.origin[flash], part.rank[flash]))]
        of_layer = np.arange(*np.searchsorted(standing.layer, [key.layer, key.layer + 1]))
        of_layer = of_layer[np.lexsort((standing.rank[of_layer], standing.expert[of_layer]))]
        return Visit(
            key=key, home_of_expert=self.placement.home_of_expert[key.layer],
            standing_expert=standing.expert[of_layer], standing_rank=standing.rank[of_layer],
            standing_tokens_CR=part.standing_tokens_CMR[of_layer, key.micro_batch],
            flash_expert=part.expert[flash], flash_rank=part.rank[flash], flash_origin=part.origin[flash],
            flash_tokens_FR=part.tokens_FR[flash],
        )  # fmt: skip

    def gap(self, load: StepLoad, stage: Stage = Stage.UPDATE) -> float:
        """Slowest ranks summed over layers and micro-batches, relative to the lower bound, minus 1 (0 is optimal)."""
        slowest, bound = self.rank_load(load, stage).max(axis=2).sum(), int(self.bound_LM.sum())
        return float(slowest / bound - 1) if bound else 0.0

    @cached_property
    def digest(self) -> str:
        """Hash of every decision; ranks compare it before they use the plan."""
        state = sha256(f"{self.planner} {self.cluster} {self.shape}".encode())
        if self.schedule is not None and self.schedule.ranks_per_sequence > 1:
            state.update(f"{self.schedule.ranks_per_sequence} ranks per sequence".encode())
        for array in self.arrays().values():
            state.update(f"{array.dtype} {array.shape}".encode())
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def arrays(self) -> dict[str, NDArray[np.integer]]:
        """Every array of the plan by name, in a fixed order."""
        arrays: dict[str, NDArray[np.integer]] = {
            "home_of_expert": self.placement.home_of_expert,
            "previous_home_of_expert": self.previous.home_of_expert,
            "standing_layer": self.standing.layer,
            "standing_expert": self.standing.expert,
            "standing_rank": self.standing.rank,
            "bound_LM": self.bound_LM,
        }
        arrays |= {f"{stage}_{name}": getattr(self.stages[stage], name) for stage in Stage for name in STAGE_ARRAYS}
        if self.schedule is not None:
            arrays["micro_batch_of_sequence"] = self.schedule.micro_batch_of_sequence
            arrays["rank_of_sequence"] = self.schedule.rank_of_sequence
            if self.schedule.mini_batch_of_micro_batch is not None:
                arrays["mini_batch_of_micro_batch"] = self.schedule.mini_batch_of_micro_batch
        return arrays

    def check(self, load: StepLoad, *, spare_slots: int | None = None, standing_slots: int | None = None) -> None:
        """Raise PlanError unless every (token, expert) pair is computed exactly once and the slots suffice.

        With spare_slots (per rank), flash copies must also stay on their node. standing_slots are per node and layer.
        """
        if load.tokens_MLER.shape != self.shape:
            raise PlanError(f"a plan for loads of shape {self.shape} does not fit loads of {load.tokens_MLER.shape}")
        for stage in Stage:
            _check_stage(self, self.stages[stage], load)
            if spare_slots is not None:
                _check_slots(self, self.stages[stage], spare_slots)
        if standing_slots is not None:
            _check_standing_slots(self, standing_slots)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPlan:
    """A plan with the load it was made for, as one expert-parallel group runs it. The same on every rank."""

    plan: StepPlan
    load: StepLoad
    """token counts of all ranks, from which all sizes follow"""
    micro_batches: list[int]
    """micro-batches that this group runs, in order"""
    late: frozenset[Stage] = frozenset()
    """stages whose flash copies would arrive too late over a single link"""

    def after(self, stage: Stage, micro_batch: int) -> int | None:
        """The micro-batch that this group runs next with the same weights; None if there is none."""
        at = self.micro_batches.index(micro_batch) + 1
        if at == len(self.micro_batches):
            return None
        following, schedule = self.micro_batches[at], self.plan.schedule
        mini = None if schedule is None else schedule.mini_batch_of_micro_batch
        if stage is Stage.UPDATE and mini is not None and mini[following] != mini[micro_batch]:
            return None  # the optimizer comes between
        return following


def _check_stage(plan: StepPlan, stage: StagePlan, load: StepLoad) -> None:
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
            f"layer {layer[at]}: expert {stage.expert[at]} is copied from rank {stage.origin[at]}, which lacks it"
        )
    key = ((layer * num_micro_batches + m) * num_experts + stage.expert) * num_ranks + stage.rank
    if np.unique(key).size != key.size:
        raise PlanError("a rank has two flash copies of the same expert in one micro-batch")


def _check_slots(plan: StepPlan, stage: StagePlan, spare_slots: int) -> None:
    """No rank holds more flash copies at a time than it has spare slots."""
    used = int(stage.on_links()[0].max())
    if used > spare_slots:
        raise PlanError(f"a rank needs {used} spare slots, {spare_slots} are allowed")
    node_of_rank = plan.cluster.node_of_rank()
    abroad = np.flatnonzero(node_of_rank[stage.rank] != node_of_rank[stage.origin])
    if abroad.size:
        at = abroad[0]
        raise PlanError(
            f"a flash copy of expert {stage.expert[at]} leaves its node: {stage.origin[at]} to {stage.rank[at]}"
        )


def _check_standing_slots(plan: StepPlan, standing_slots: int) -> None:
    """No node holds more standing copies of a layer than it has slots for."""
    node = plan.cluster.node_of_rank()[plan.standing.rank]
    used = np.bincount(plan.standing.layer * plan.cluster.num_nodes + node)
    if used.size and used.max() > standing_slots:
        raise PlanError(f"a node needs {used.max()} standing slots in one layer, {standing_slots} are allowed")
