"""What every algorithm is. `registry` finds an algorithm by its name.

Symbols: A answer tokens of a sample so far.

From samples, rewards and values an algorithm makes advantages and returns. It chooses the tokens that the policy and
the value model train on, and the loss. All samples of a group are on the same rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.rl.loss import LossSetting, Total
from equilibra.rl.sample import Sample

__all__ = ["Algorithm", "Target", "check_finished"]

PLAIN_LOSS = LossSetting()


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What one sample is trained towards."""

    advantages: NDArray[np.float64]
    """[A]; the entries of untrained tokens are ignored"""
    returns: NDArray[np.float64] | None = None
    """[A] targets of the value model; None without one"""

    def __post_init__(self) -> None:
        if self.returns is not None and self.returns.shape != self.advantages.shape:
            raise InputError(
                f"{self.advantages.shape} advantages need as many returns, one per token, not {self.returns.shape}"
            )


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Turns samples into targets. The fields of a subclass are its options."""

    name: ClassVar[str]
    """in the registry and in configurations"""
    needs_values: ClassVar[bool] = False
    """whether it needs a value model"""
    windowed: ClassVar[bool] = False
    """whether it can train on unfinished answers"""

    loss: LossSetting = PLAIN_LOSS

    @property
    def value_clip(self) -> float:
        """Largest change of a value that the value loss rewards; 0: no limit."""
        return 0.0

    def policy_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] answer tokens that the policy trains on in this step: all."""
        return np.ones(sample.answer.size, np.bool_)

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] answer tokens that the value model trains on in this step: none."""
        return np.zeros(sample.answer.size, np.bool_)

    def targets(
        self, samples: Sequence[Sample], values: Sequence[NDArray[np.float64]] | None, total: Total
    ) -> list[Target]:
        """One target per own sample. `values` [A] are those of the states before each answer token.

        Every rank calls this, even without samples, because `total` sums over all ranks.
        """
        raise NotImplementedError


def check_finished(name: str, samples: Iterable[Sample]) -> None:
    """Refuse unfinished answers, which only windowed algorithms can train on."""
    unfinished = [sample for sample in samples if not sample.finished]
    if unfinished:
        first = unfinished[0]
        raise InputError(
            f"{name} cannot train on {len(unfinished)} unfinished answers (group {first.group}, number {first.number}, "
            f"{first.answer.size} tokens): answers must end; use a windowed algorithm such as tppo, or a limit"
        )
