"""PPO: a value model says what was to be expected, token by token.

Symbols: A answer tokens.

The reward is on the last token; `gae_advantages` spreads it. Whitening gives the advantages of all
policy-trained tokens of all ranks mean 0 and standard deviation 1; returns are made before, so that the value model
learns rewards. A token's return is its advantage plus its old value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.rl.algorithms.algorithm import Target, check_finished
from equilibra.rl.loss import LossSetting, Total
from equilibra.rl.sample import Sample

__all__ = ["Ppo", "gae_advantages", "gae_returns", "token_rewards", "whitened"]

# Generalised advantage estimation, also of answers that are not finished (T-PPO's extended GAE).
#
# Symbols: A answer tokens so far, γ discount, λ decay, r_t reward on token t, V_t value of the state before token t, so
# after the prompt and t answer tokens.
#
#     δ_t = r_t + γ·V_{t+1} - V_t
#     A_t = Σ_{i=t}^{A-1} (γλ)^(i-t) δ_i
#
# V_A, of the state after the last token, is 0 if the answer is finished. If it goes on, that state was not valued: V_A
# is taken as V_{A-1}. With γ = 1 the last token of an unfinished answer then has the advantage 0.


def gae_advantages(
    rewards_A: NDArray[np.float64], values_A: NDArray[np.float64], *, discount: float, decay: float, finished: bool
) -> NDArray[np.float64]:
    """[A] from the rewards and values of one answer."""
    if rewards_A.ndim != 1 or rewards_A.shape != values_A.shape:
        raise InputError(
            f"advantages need a reward and a value for each token, not {rewards_A.shape} and {values_A.shape}"
        )
    for name, value in (("discount", discount), ("decay", decay)):
        if not 0 <= value <= 1:
            raise InputError(f"the {name} of advantages must be from 0 to 1, not {value}")
    values = np.asarray(values_A, np.float64)
    after = np.append(values[1:], 0.0 if finished else values[-1:])[: values.size]
    deltas = rewards_A + discount * after - values
    found, running = np.empty(values.size), 0.0
    for t, delta in zip(range(values.size - 1, -1, -1), deltas[::-1].tolist(), strict=True):
        running = delta + discount * decay * running
        found[t] = running
    return found


def gae_returns(advantages_A: NDArray[np.float64], values_A: NDArray[np.float64]) -> NDArray[np.float64]:
    """[A] what the value model learns: advantages (not whitened) plus the values they were made with."""
    return advantages_A + np.asarray(values_A, np.float64)


SMALLEST_STD = 1e-6
"""added to the standard deviation"""

RANGES = (("value_clip", inf, ", 0 or more"), ("discount", 1.0, " from 0 to 1"), ("decay", 1.0, " from 0 to 1"))
"""of options, in numbers and words"""
LOSS = LossSetting()
"""clipped at 0.2 on both sides, all tokens the same"""


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """Advantages over the expectation of a value model."""

    name: ClassVar[str] = "ppo"
    needs_values: ClassVar[bool] = True
    windowed: ClassVar[bool] = False

    loss: LossSetting = LOSS
    """of the policy"""
    value_clip: float = 0.2
    """how far values count away from the old ones in the value loss; 0 for any distance"""
    discount: float = 1.0
    """γ, from 0 to 1"""
    decay: float = 0.95
    """λ, from 0 to 1: 1 trusts rewards only, 0 values only"""
    whiten: bool = True
    """whether advantages get mean 0 and standard deviation 1 over the trained tokens of all ranks"""

    def __post_init__(self) -> None:
        for name, high, required in RANGES:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= high or value == inf:
                raise InputError(f"{name} of {self.name} must be a number{required}, not {value!r}")
        if not isinstance(self.whiten, bool):
            raise InputError(f"whiten of {self.name} must be true or false, not {self.whiten!r}")

    def policy_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] all."""
        return np.ones(sample.answer.size, np.bool_)

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] all."""
        return np.ones(sample.answer.size, np.bool_)

    def targets(
        self, samples: Sequence[Sample], values: Sequence[NDArray[np.float64]] | None, total: Total
    ) -> list[Target]:
        """Advantages and returns from rewards and values."""
        if not self.windowed:
            check_finished(self.name, samples)
        if values is None or len(values) != len(samples):
            had = "none" if values is None else f"those of {len(values)}"
            raise InputError(f"{self.name} needs the values of {len(samples)} answers, token by token, not {had}")
        found = [
            gae_advantages(
                token_rewards(sample), own, discount=self.discount, decay=self.decay, finished=sample.finished
            )
            for sample, own in zip(samples, values, strict=True)
        ]
        returns = [gae_returns(one, own) for one, own in zip(found, values, strict=True)]
        if self.whiten:
            found = whitened(found, [self.policy_mask(sample) for sample in samples], total)
        return [Target(advantages=one, returns=own) for one, own in zip(found, returns, strict=True)]


def token_rewards(sample: Sample) -> NDArray[np.float64]:
    """[A] the reward on the last token, if the answer is finished."""
    rewards = np.zeros(sample.answer.size)
    if sample.finished:
        rewards[-1:] = sample.reward
    return rewards


def whitened(
    numbers: Sequence[NDArray[np.float64]], masks: Sequence[NDArray[np.bool_]], total: Total
) -> list[NDArray[np.float64]]:
    """Minus the mean, divided by the standard deviation, both over the masked numbers of all ranks.

    Two sums over ranks: first the mean, then squares around it, so that nothing cancels.
    """
    chosen = np.concatenate([np.zeros(0), *(one[mask] for one, mask in zip(numbers, masks, strict=True))])
    num, whole = total(np.array([chosen.size, chosen.sum()]))
    mean = whole / max(num, 1.0)
    (squares,) = total(np.array([np.square(chosen - mean).sum()]))
    std = float(np.sqrt(squares / max(num, 1.0)))
    return [(one - mean) / (std + SMALLEST_STD) for one in numbers]
