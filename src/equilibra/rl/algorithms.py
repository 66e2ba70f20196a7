"""The algorithms: how rewards become advantages and returns, which tokens are trained, and with which loss.

Symbols: n answers of a group, r_i reward of answer i, A answer tokens so far, s_i ratio of sequence i (the geometric
mean of its tokens' ratios), γ discount, λ decay, r_t reward on token t, V_t value of the state before token t.

GRPO and GSPO compare the answers to one prompt with each other, without a value model:

    advantage of every token of answer i = (r_i - mean r) / (std r + 1e-6), with n - 1 in the standard deviation
    GSPO: objective of sequence i = min(s_i·A_i, clamp(s_i, 1 - 3e-4, 1 + 4e-4)·A_i), averaged over sequences

If all rewards of a group are equal, advantages are exactly 0. Dr. GRPO is normalise=False with the loss average
sequence-sum-over-max. RLOO is leave_one_out=True with normalise=False: subtracting the mean of the other answers scales
the difference by n / (n - 1). GSPO clips tightly because s_i moves far less than a token's ratio.

PPO and T-PPO measure advantages against a value model's expectation, token by token (GAE):

    δ_t = r_t + γ·V_{t+1} - V_t
    A_t = Σ_{i=t}^{A-1} (γλ)^(i-t) δ_i

The reward is on the last token. V_A is 0 for a finished answer and V_{A-1} for an unfinished one (extended GAE). A
token's return is its advantage plus its old value. Then advantages are whitened: mean 0 and standard deviation 1 over
the policy-trained tokens of all ranks.

T-PPO (arXiv 2506.15050) runs PPO on windows of generation, so no step waits for the longest answer. Unfinished answers
continue in the next window. The policy trains on the tokens of the newest window; older tokens were trained on in their
own step. The value model trains on all tokens of finished answers, because only these have a reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_flag, check_number
from equilibra.core.errors import InputError
from equilibra.rl.engine import Sample
from equilibra.rl.loss import Average, LossSetting, Ratio, Total

SMALLEST_STD = 1e-6
"""added to standard deviations"""
PLAIN_LOSS = LossSetting()
GRPO_LOSS = LossSetting(clip_low=0.2, clip_high=0.28)
GSPO_LOSS = LossSetting(clip_low=3e-4, clip_high=4e-4, ratio=Ratio.SEQUENCE, average=Average.SEQUENCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What one sample is trained towards."""

    advantages: NDArray[np.float64]
    """[A]; the entries of untrained tokens are ignored"""
    returns: NDArray[np.float64] | None = None
    """[A] targets of the value model; None without one"""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Turns samples into targets. The fields of a subclass are its options."""

    name: ClassVar[str]
    """as configurations name it"""
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

        All samples of a group are on the same rank. Every rank calls this, even without samples, because `total` sums
        over all ranks.
        """
        raise NotImplementedError

    def check_finished(self, samples: Sequence[Sample]) -> None:
        """Refuse unfinished answers, which only windowed algorithms can train on."""
        unfinished = [sample for sample in samples if not sample.finished]
        if unfinished:
            first = unfinished[0]
            raise InputError(
                f"{self.name} cannot train on {len(unfinished)} unfinished answers (group {first.group}, number "
                f"{first.number}, {first.answer.size} tokens): answers must end; use a windowed algorithm such as "
                "tppo, or a limit"
            )


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
        self.check_finished(samples)
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
            self.check_finished(samples)
        if values is None or len(values) != len(samples):
            had = "none" if values is None else f"those of {len(values)}"
            raise InputError(f"{self.name} needs the values of {len(samples)} answers, token by token, not {had}")
        found = [
            gae_advantages(
                token_rewards(sample), own, discount=self.discount, decay=self.decay, finished=sample.finished
            )
            for sample, own in zip(samples, values, strict=True)
        ]
        returns = [one + own for one, own in zip(found, values, strict=True)]
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
    values = np.asarray(values_A, np.float64)
    after = np.append(values[1:], 0.0 if finished else values[-1:])[: values.size]
    deltas = (rewards_A + discount * after - values).tolist()
    found, running = np.empty(values.size), 0.0
    for t in reversed(range(values.size)):
        running = deltas[t] + discount * decay * running
        found[t] = running
    return found


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


ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (Grpo, Gspo, Ppo, Tppo)}


def algorithm_named(name: str, *, loss: Mapping[str, Any] | None = None, **options: Any) -> Algorithm:  # noqa: ANN401
    """The algorithm of that name with the given options; `loss` changes fields of its `LossSetting`."""
    _check_known("algorithm", [name], ALGORITHMS)
    make = ALGORITHMS[name]
    _check_known(f"option of {name}", options, [option for option in _fields(make) if option != "loss"])
    if loss:
        _check_known(f"option of the loss of {name}", loss, _fields(LossSetting))
        options["loss"] = replace(make().loss, **loss)
    return make(**options)


def _fields(kind: type[Algorithm | LossSetting]) -> list[str]:
    return [field.name for field in fields(kind)]


def _check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"no {what} is named {name!r}; use one of {', '.join(known)}")
