"""PPO and T-PPO: advantages over a value model's expectation, token by token.

Symbols: A answer tokens so far, γ discount, λ decay, r_t reward on token t, V_t value of the state before token t.

    δ_t = r_t + γ·V_{t+1} - V_t
    A_t = Σ_{i=t}^{A-1} (γλ)^(i-t) δ_i

The reward is on the last token. V_A is 0 for a finished answer and V_{A-1} for an unfinished one (extended GAE). A
token's return is its advantage plus its old value. Whitening comes after that: over the policy-trained tokens of all
ranks, advantages get mean 0 and standard deviation 1.

T-PPO (arXiv 2506.15050) runs PPO on windows of generation, so no step waits for the longest answer. Unfinished answers
continue in the next window. The policy trains on the tokens of the newest window; older tokens were trained on in their
own step. The value model trains on all tokens of finished answers, because only these have a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_flag, check_number
from equilibra.core.errors import InputError
from equilibra.rl.algorithms.algorithm import Algorithm, Target, check_finished
from equilibra.rl.loss import Total
from equilibra.rl.sample import Sample

__all__ = ["Ppo", "Tppo", "gae_advantages", "gae_returns", "token_rewards", "whitened"]

SMALLEST_STD = 1e-6
"""added to the standard deviation"""


@dataclass(frozen=True, kw_only=True)
class Ppo(Algorithm):
    """Generalised advantage estimation with a value model."""

    name: ClassVar[str] = "ppo"
    needs_values: ClassVar[bool] = True

    value_clip: float = 0.2
    """largest change of a value that the value loss rewards; 0: no limit"""
    discount: float = 1.0
    """γ, from 0 to 1"""
    decay: float = 0.95
    """λ, from 0 to 1: 1 trusts rewards only, 0 values only"""
    whiten: bool = True
    """whether advantages get mean 0 and standard deviation 1 over the trained tokens of all ranks"""

    def __post_init__(self) -> None:
        check_number(f"value_clip of {self.name}", self.value_clip)
        check_number(f"discount of {self.name}", self.discount, high=1)
        check_number(f"decay of {self.name}", self.decay, high=1)
        check_flag(f"whiten of {self.name}", self.whiten)

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        return self.policy_mask(sample)

    def targets(
        self, samples: Sequence[Sample], values: Sequence[NDArray[np.float64]] | None, total: Total
    ) -> list[Target]:
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


@dataclass(frozen=True, kw_only=True)
class Tppo(Ppo):
    """PPO on windows of generation; whitening is over the tokens of the newest windows."""

    name: ClassVar[str] = "tppo"
    windowed: ClassVar[bool] = True

    def policy_mask(self, sample: Sample) -> NDArray[np.bool_]:
        return np.arange(sample.answer.size) >= sample.fresh

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        return np.full(sample.answer.size, sample.finished)


def gae_advantages(
    rewards_A: NDArray[np.float64], values_A: NDArray[np.float64], *, discount: float, decay: float, finished: bool
) -> NDArray[np.float64]:
    """[A] advantages of one answer."""
    if rewards_A.ndim != 1 or rewards_A.shape != values_A.shape:
        raise InputError(
            f"advantages need a reward and a value for each token, not {rewards_A.shape} and {values_A.shape}"
        )
    check_number("the discount of advantages", discount, high=1)
    check_number("the decay of advantages", decay, high=1)
    values = np.asarray(values_A, np.float64)
    after = np.append(values[1:], 0.0 if finished else values[-1:])[: values.size]
    deltas = rewards_A + discount * after - values
    found, running = np.empty(values.size), 0.0
    for t, delta in zip(range(values.size - 1, -1, -1), deltas[::-1].tolist(), strict=True):
        running = delta + discount * decay * running
        found[t] = running
    return found


def gae_returns(advantages_A: NDArray[np.float64], values_A: NDArray[np.float64]) -> NDArray[np.float64]:
    """[A] targets of the value model; `advantages_A` before whitening."""
    return advantages_A + np.asarray(values_A, np.float64)


def token_rewards(sample: Sample) -> NDArray[np.float64]:
    """[A] zeros, with the reward of a finished answer on its last token."""
    rewards = np.zeros(sample.answer.size)
    if sample.finished:
        rewards[-1:] = sample.reward
    return rewards


def whitened(
    numbers: Sequence[NDArray[np.float64]], masks: Sequence[NDArray[np.bool_]], total: Total
) -> list[NDArray[np.float64]]:
    """Subtract the mean and divide by the standard deviation of the masked numbers of all ranks.

    Takes two sums over ranks: the mean, then the squares around it, which avoids cancellation.
    """
    chosen = np.concatenate([np.zeros(0), *(one[mask] for one, mask in zip(numbers, masks, strict=True))])
    num, whole = total(np.array([chosen.size, chosen.sum()]))
    mean = whole / max(num, 1.0)
    (squares,) = total(np.array([np.square(chosen - mean).sum()]))
    std = float(np.sqrt(squares / max(num, 1.0)))
    return [(one - mean) / (std + SMALLEST_STD) for one in numbers]
