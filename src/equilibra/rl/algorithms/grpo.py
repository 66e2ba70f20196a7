"""GRPO and GSPO: answers to one prompt are compared with each other, without a value model.

Symbols: n answers of a group, r_i reward of answer i, A answer tokens, s_i ratio of sequence i: the geometric mean of
its tokens' ratios.

    advantage of every token of answer i = (r_i - mean r) / (std r + 1e-6), with n - 1 in the standard deviation
    GSPO: objective of sequence i = min(s_i·A_i, clamp(s_i, 1 - 3e-4, 1 + 4e-4)·A_i), averaged over sequences

Where all rewards of a group are equal, advantages are exactly 0. Dr. GRPO is normalise=False with the loss average
sequence-sum-over-max. RLOO is leave_one_out=True with normalise=False: subtracting the mean of the other answers scales
the difference by n / (n - 1). GSPO clips tightly because s_i moves far less than a token's ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_flag
from equilibra.rl.algorithms.algorithm import Algorithm, Target, check_finished
from equilibra.rl.loss import Average, LossSetting, Ratio, Total
from equilibra.rl.sample import Sample

__all__ = ["Grpo", "Gspo", "group_advantages"]

SMALLEST_STD = 1e-6
"""added to the standard deviation"""
GRPO_LOSS = LossSetting(clip_low=0.2, clip_high=0.28)
GSPO_LOSS = LossSetting(clip_low=3e-4, clip_high=4e-4, ratio=Ratio.SEQUENCE, average=Average.SEQUENCE)


@dataclass(frozen=True, kw_only=True)
class Grpo(Algorithm):
    """Group-relative advantages, clip-higher, averaged over tokens."""

    name: ClassVar[str] = "grpo"

    loss: LossSetting = GRPO_LOSS
    normalise: bool = True
    """divide by the standard deviation of the group"""
    leave_one_out: bool = False
    """subtract the mean of the other answers, not of all"""

    def __post_init__(self) -> None:
        check_flag(f"normalise of {self.name}", self.normalise)
        check_flag(f"leave_one_out of {self.name}", self.leave_one_out)

    def targets(
        self,
        samples: Sequence[Sample],
        values: Sequence[NDArray[np.float64]] | None,  # noqa: ARG002
        total: Total,  # noqa: ARG002
    ) -> list[Target]:
        """All tokens of an answer have the same advantage."""
        check_finished(self.name, samples)
        members: dict[int, list[int]] = defaultdict(list)
        for number, sample in enumerate(samples):
            members[sample.group].append(number)
        advantage = np.zeros(len(samples))
        rewards = np.array([sample.reward for sample in samples])
        for group in members.values():
            advantage[group] = group_advantages(
                rewards[group], normalise=self.normalise, leave_one_out=self.leave_one_out
            )
        return [
            Target(advantages=np.full(sample.answer.size, one)) for sample, one in zip(samples, advantage, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Gspo(Grpo):
    """GRPO's advantages with sequence ratios, averaged over sequences; the clips are the paper's."""

    name: ClassVar[str] = "gspo"

    loss: LossSetting = GSPO_LOSS


def group_advantages(
    rewards: NDArray[np.float64], *, normalise: bool, leave_one_out: bool = False
) -> NDArray[np.float64]:
    """[n] advantages of the answers of one group."""
    num = rewards.size
    if num < 2 or rewards.min() == rewards.max():  # exactly 0: a rounded mean would be divided by almost nothing
        return np.zeros(num)
    above: NDArray[np.float64] = rewards - rewards.mean()
    if leave_one_out:
        above *= num / (num - 1)
    if normalise:
        above /= rewards.std(ddof=1) + SMALLEST_STD
    return above
