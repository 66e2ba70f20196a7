"""Parts of a plan: the standing copies of a step, and the flash copies and splits of one stage.

Symbols: M micro-batches, L layers, R ranks, C standing copies, F flash copies of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import PlanError

__all__ = ["STAGE_ARRAYS", "StagePlan", "StandingCopies", "check_range", "freeze"]

STAGE_ARRAYS = ("first_of_problem", "expert", "rank", "origin", "tokens_FR", "standing_tokens_CMR")
"""arrays of a StagePlan, in the order of the digest"""


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
