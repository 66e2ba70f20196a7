"""GSPO: advantages of GRPO, but ratios of sequences instead of tokens.

Symbols: s_i ratio of sequence i, the geometric mean of its tokens' ratios.

    objective of sequence i = min(s_i·A_i, clamp(s_i, 1 - 3e-4, 1 + 4e-4)·A_i), averaged over sequences

s_i moves far less than a token's ratio, hence the small clips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equilibra.rl.algorithms.grpo import Grpo
from equilibra.rl.loss import Average, LossSetting, Ratio

__all__ = ["Gspo"]

LOSS = LossSetting(clip_low=3e-4, clip_high=4e-4, ratio=Ratio.SEQUENCE, average=Average.SEQUENCE)
"""the clips of the paper, each sequence the same"""


@dataclass(frozen=True, kw_only=True)
class Gspo(Grpo):
    """Group-relative advantages, ratios of sequences."""

    name: ClassVar[str] = "gspo"

    loss: LossSetting = LOSS
    """of the policy"""
