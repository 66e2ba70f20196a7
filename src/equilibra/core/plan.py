"""StepPlan: everything that is decided before a step, and the proof that it is complete.

Symbols: M micro-batches, L layers, R ranks, E experts, C standing copies, F flash copies of a stage.

A plan says which copies exist and how many tokens of each source each copy serves. The home of an expert serves all
its other tokens, so no token can be served twice or not at all, as long as no copy is given more tokens of a (source,
expert) than there are. `StepPlan.check` verifies that and the budgets against a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Migration, Placement
from equilibra.core.plan_checks import (
    check_range,
    check_same_length,
    check_slots,
    check_stage,
    check_standing_slots,
    freeze,
)
from equilibra.core.schedule import Schedule

__all__ = ["STAGE_ARRAYS", "Stage", "StagePlan", "StandingCopies", "StepPlan"]


STAGE_ARRAYS = ("first_of_problem", "expert", "rank", "origin", "tokens_FR", "standing_tokens_CMR")
"""arrays of a StagePlan, in the order of the digest"""


class Stage(StrEnum):
    """The two passes over a rollout."""

    LOGPROB = "logprob"
    """old log-probabilities: forward only"""
    UPDATE = "update"
    """policy update: forward and backward"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StandingCopies:
    """Second instances that stand for the whole step, sorted by layer, expert and rank."""

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
        """C."""
        return int(self.layer.size)

    @classmethod
    def none(cls) -> StandingCopies:
        """No standing copies."""
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
        if (
            first.ndim != 1
            or first.size < 2
            or first[0] != 0
            or first[-1] != self.num_copies
            or (np.diff(first) < 0).any()
        ):
            raise PlanError(f"first_of_problem must rise from 0 to the {self.num_copies} flash copies")
        if tokens.ndim != 2 or len(tokens) != self.num_copies or standing.ndim != 3:
            raise PlanError(f"tokens of {self.num_copies} flash copies cannot be {tokens.shape} and {standing.shape}")
        if tokens.dtype != np.int32 or standing.dtype != np.int32:
            raise PlanError(f"tokens must be int32, not {tokens.dtype} and {standing.dtype}")
        freeze(first, self.expert, self.rank, self.origin, tokens, standing)

    @property
    def num_copies(self) -> int:
        """F."""
        return int(self.expert.size)

    def problem_of_copy(self) -> NDArray[np.int64]:
        """[F] l * M + m of each flash copy."""
        return np.repeat(np.arange(self.first_of_problem.size - 1), np.diff(self.first_of_problem))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The plan of one step."""

    planner: str
    """name of the planner that made it"""
    placement: Placement
    """homes during the step"""
    previous: Placement
    """homes before it"""
    standing: StandingCopies
    """copies for the whole step"""
    stages: dict[Stage, StagePlan]
    """flash copies and splits, by stage; both may be the same object"""
    bound_LM: NDArray[np.int64]
    """[L, M] tokens below which the slowest rank cannot be, whatever the plan"""
    schedule: Schedule | None = None
    """where every sequence goes, if the planner packed them"""

    def __post_init__(self) -> None:
        if set(self.stages) != set(Stage):
            raise PlanError(f"a plan needs the stages {', '.join(Stage)}, not {', '.join(self.stages)}")
        if self.bound_LM.ndim != 2 or len(self.bound_LM) != self.num_layers:
            raise PlanError(f"{self.num_layers} layers cannot have bounds of shape {self.bound_LM.shape}")
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
        """The ranks."""
        return self.placement.cluster

    @property
    def num_layers(self) -> int:
        """L."""
        return self.placement.num_layers

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return int(self.bound_LM.shape[1])

    @property
    def migration(self) -> Migration:
        """Homes that move before the step."""
        return Migration(before=self.previous, after=self.placement)

    def rank_load(self, load: StepLoad, stage: Stage = Stage.UPDATE) -> NDArray[np.int64]:
        """[L, M, R] tokens that each rank computes."""
        if load.tokens_MLER.shape != self.shape:
            raise InputError(f"a plan for loads of shape {self.shape} was given loads of {load.tokens_MLER.shape}")
        num_micro_batches, num_layers, _, num_ranks = self.shape
        home, plan, standing = self.placement.home_of_expert, self.stages[stage], self.standing
        result = np.zeros(num_layers * num_micro_batches * num_ranks, np.int64)
        problem_LM = np.arange(num_layers * num_micro_batches).reshape(num_layers, num_micro_batches)
        expert_load_LME = load.expert_load().transpose(1, 0, 2)
        np.add.at(result, (problem_LM[:, :, None] * num_ranks + home[:, None, :]), expert_load_LME)
        problem = plan.problem_of_copy() * num_ranks
        served = plan.tokens_FR.sum(axis=1, dtype=np.int64)
        layer = plan.problem_of_copy() // num_micro_batches
        np.subtract.at(result, problem + home[layer, plan.expert], served)
        np.add.at(result, problem + plan.rank, served)
        served_CM = plan.standing_tokens_CMR.sum(axis=2, dtype=np.int64)
        problem_CM = problem_LM[standing.layer] * num_ranks
        np.subtract.at(result, problem_CM + home[standing.layer, standing.expert][:, None], served_CM)
        np.add.at(result, problem_CM + standing.rank[:, None], served_CM)
        return result.reshape(num_layers, num_micro_batches, num_ranks)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(M, L, E, R) of the loads it was made for."""
        return (self.num_micro_batches, self.num_layers, self.placement.num_experts, self.cluster.num_ranks)

    def gap(self, load: StepLoad, stage: Stage = Stage.UPDATE) -> float:
        """How far the slowest ranks, summed over layers and micro-batches, are above the lower bound (0 is optimal)."""
        slowest, bound = self.rank_load(load, stage).max(axis=2).sum(), int(self.bound_LM.sum())
        return float(slowest / bound - 1) if bound else 0.0

    @cached_property
    def digest(self) -> str:
        """A hash of every decision: ranks compare it before they use the plan."""
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
        for stage in Stage:
            plan = self.stages[stage]
            for name in STAGE_ARRAYS:
                arrays[f"{stage}_{name}"] = getattr(plan, name)
        if self.schedule is not None:
            arrays["micro_batch_of_sequence"] = self.schedule.micro_batch_of_sequence
            arrays["rank_of_sequence"] = self.schedule.rank_of_sequence
            if self.schedule.mini_batch_of_micro_batch is not None:
                arrays["mini_batch_of_micro_batch"] = self.schedule.mini_batch_of_micro_batch
        return arrays

    def check(self, load: StepLoad, *, spare_slots: int | None = None, standing_slots: int | None = None) -> None:
        """Raise PlanError unless every (token, expert) pair is computed exactly once and the slots suffice.

        With spare_slots, flash copies must also stay within their node; standing_slots are per node and layer.
        """
        if load.tokens_MLER.shape != self.shape:
            raise PlanError(f"a plan for loads of shape {self.shape} does not fit loads of {load.tokens_MLER.shape}")
        for stage in Stage:
            check_stage(self, self.stages[stage], load)
            if spare_slots is not None:
                check_slots(self, self.stages[stage], spare_slots)
        if standing_slots is not None:
            check_standing_slots(self, standing_slots)
