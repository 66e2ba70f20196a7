"""Parts of a plan: the standing copies of a step, and the flash copies and splits of one stage.

Symbols: M micro-batches, L layers, R ranks, C standing copies, F flash copies of a stage.
"""

from __future__ import annotations

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
