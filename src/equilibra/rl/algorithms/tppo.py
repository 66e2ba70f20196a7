"""T-PPO: PPO on windows of generation (arXiv 2506.15050), so that no step waits for the longest answer.

Symbols: A answer tokens so far.

Generation stops after a window; unfinished answers go on in the next one, finished ones are replaced by new ones. The
policy trains on the tokens of the newest window, of unfinished answers too: older ones were trained on in their own
step. Their advantages are those of the extended GAE, over the whole answer so far. The value model trains on finished
answers only, but on all of their tokens: only these know their reward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.rl.algorithms.ppo import Ppo
from equilibra.rl.sample import Sample

__all__ = ["SuccessiveBatch", "Tppo", "successive_batch"]


@dataclass(frozen=True, kw_only=True)
class Tppo(Ppo):
    """PPO on windows. Whitening is over the tokens of the newest windows."""

    name: ClassVar[str] = "tppo"
    windowed: ClassVar[bool] = True

    def policy_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] those of the newest window."""
        return np.arange(sample.answer.size) >= sample.fresh

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] all of a finished answer, none of an unfinished one."""
        return np.full(sample.answer.size, sample.finished)


@dataclass(frozen=True, kw_only=True, eq=False)
class SuccessiveBatch:
    """What the next window generates."""

    going_on: tuple[Sample, ...]
    """unfinished answers, in the order they had"""
    num_new: int
    """answers to start"""


def successive_batch(samples: Iterable[Sample], *, capacity: int) -> SuccessiveBatch:
    """The batch after this one: what is unfinished goes on, and new answers fill it up to `capacity`."""
    going_on = tuple(sample for sample in samples if not sample.finished)
    if capacity < max(1, len(going_on)):
        raise InputError(
            f"a batch of {capacity} answers cannot take {len(going_on)} unfinished ones: it must have room for all, "
            "and for at least one"
        )
    return SuccessiveBatch(going_on=going_on, num_new=capacity - len(going_on))
