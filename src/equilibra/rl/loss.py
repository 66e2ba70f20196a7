"""The policy loss of all algorithms, and the value loss.

Symbols: T answer tokens of a micro-batch, A answer tokens of one sample, r ratio of the probabilities of a token under
the new policy and under the one that generated it, c dual clip.

    policy loss = Σ_t weight_t · ( -objective_t + kl_weight · divergence_t - entropy_weight · entropy_t )
    objective_t = min(r·A_t, clamp(r, 1 - clip_low, 1 + clip_high)·A_t), and not below c·A_t if A_t < 0 and c > 0

All averaging is in the weights, which `token_weights` makes for a whole mini-batch. So losses add up over micro-batches
and ranks, and gradients are summed, never averaged. Tokens of weight 0 have no influence, even if their inputs are NaN.
Sums are in float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.checks import check_choice, check_number
from equilibra.core.errors import InputError

Total = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""collective: sums an array over all ranks"""

MAX_LOG_RATIO = 20.0
"""log-ratios are clamped here: e^20 is far outside any clip, and infinity would make gradients NaN"""


class Ratio(StrEnum):
    """Which ratio is clipped."""

    TOKEN = "token"  # noqa: S105
    """one per token"""
    SEQUENCE = "sequence"
    """GSPO: one per sequence, the geometric mean over its trained tokens"""


class Divergence(StrEnum):
    """Estimators of the divergence from the reference, per token; d = log π - log reference."""

    NONE = "none"
    K1 = "k1"
    """d: unbiased, but the expected gradient is zero"""
    K2 = "k2"
    """d² / 2: biased, but the expected gradient is that of the divergence"""
    K3 = "k3"
    """exp(-d) + d - 1: unbiased, never negative"""


class Average(StrEnum):
    """How the loss of a mini-batch is averaged."""

    TOKEN = "token"  # noqa: S105
    """mean over trained tokens"""
    SEQUENCE = "sequence"
    """mean over sequences of the mean over their trained tokens"""
    SEQUENCE_SUM_OVER_MAX = "sequence-sum-over-max"
    """Dr. GRPO: sum over tokens, divided by the number of sequences and one common length"""


@dataclass(frozen=True, kw_only=True)
class LossSetting:
    """Settings of the policy loss; enums may be given by value: ratio="sequence"."""

    clip_low: float = 0.2
    """the ratio is clipped below 1 - clip_low; above 0, at most 1"""
    clip_high: float = 0.2
    """the ratio is clipped above 1 + clip_high; above 0"""
    dual_clip: float = 0.0
    """c: with a negative advantage A_t the objective is at least c·A_t; above 1, or 0 for off"""
    ratio: Ratio = Ratio.TOKEN
    divergence: Divergence = Divergence.NONE
    """estimator of the divergence from the reference; reported even if kl_weight is 0"""
    kl_weight: float = 0.0
    """weight of the divergence in the loss"""
    entropy_weight: float = 0.0
    """weight of the entropy bonus"""
    average: Average = Average.TOKEN

    def __post_init__(self) -> None:
        for name, kind in (("ratio", Ratio), ("divergence", Divergence), ("average", Average)):
            check_choice(name, getattr(self, name), list(kind))
            object.__setattr__(self, name, kind(getattr(self, name)))
        check_number("clip_low", self.clip_low, above=0, high=1)
        check_number("clip_high", self.clip_high, above=0)
        if self.dual_clip != 0:
            check_number("dual_clip, where it is not 0 for off,", self.dual_clip, above=1)
        check_number("kl_weight", self.kl_weight)
        check_number("entropy_weight", self.entropy_weight)
        if self.kl_weight > 0 and self.divergence is Divergence.NONE:
            raise InputError(f"kl_weight {self.kl_weight} needs a divergence; use k1, k2 or k3, or weight 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of a micro-batch and its statistics, which add up over micro-batches and ranks.

    For means divide by the summed `weight`, which is 1 over a mini-batch except under `SEQUENCE_SUM_OVER_MAX`.
    """

    loss: Tensor
    """[] with its gradient"""
    policy: Tensor
    """[] weighted sum of -objective"""
    kl: Tensor
    """[] weighted sum of r - 1 - log r: divergence from the policy that generated"""
    divergence: Tensor
    """[] weighted sum of the divergence from the reference, without kl_weight"""
    entropy: Tensor
    """[] weighted sum of the entropy, without entropy_weight"""
    clipped: Tensor
    """[] weight of the clipped tokens, which get no gradient"""
    weight: Tensor
    """[] sum of the weights"""


def token_weights(
    masks: Sequence[NDArray[np.bool_]], setting: LossSetting, total: Total, max_length: int
) -> list[NDArray[np.float64]]:
    """Collective: weights [A] for each own sample of a mini-batch; `masks` say which tokens are trained.

    Sequences without a trained token are not counted.
    """
    lengths = [int(np.count_nonzero(mask)) for mask in masks]
    own = np.array([sum(lengths), sum(length > 0 for length in lengths)], np.float64)
    num_tokens, num_sequences = (float(count) for count in total(own))

    def weight(length: int) -> float:
        if setting.average is Average.TOKEN:
            return 1 / num_tokens
        return 1 / (num_sequences * (length if setting.average is Average.SEQUENCE else max_length))

    return [
        np.where(mask, weight(length), 0.0) if length else np.zeros(mask.shape)
        for mask, length in zip(masks, lengths, strict=True)
    ]


def policy_loss(
    new_T: Tensor, old_T: Tensor, advantages_T: Tensor, weights_T: Tensor, sequence_T: Tensor, setting: LossSetting, *,
    reference_T: Tensor | None = None, entropy_T: Tensor | None = None,
) -> PolicyLoss:  # fmt: skip
    """The policy loss of a micro-batch of whole sequences; only `new_T` and `entropy_T` get gradients.

    `new_T`, `old_T` and `reference_T` are log-probabilities of the tokens now, when they were generated (or before the
    first mini-batch), and under the reference. `sequence_T` numbers the sequences of the micro-batch from 0.
    """
    if setting.divergence is not Divergence.NONE and reference_T is None:
        raise InputError(f"the divergence {setting.divergence} needs log-probabilities under the reference")
    if setting.entropy_weight and entropy_T is None:
        raise InputError(f"entropy_weight {setting.entropy_weight} needs the entropy of each token")
    _check_shapes(
        new=new_T, old=old_T, advantages=advantages_T, weights=weights_T, sequence=sequence_T, reference=reference_T,
        entropy=entropy_T,
    )  # fmt: skip
    clean = _Cleaner(weights_T, new_T)
    new, advantages = clean(new_T), clean(advantages_T).detach()
    token_log_ratio = log_ratio = new - clean(old_T).detach()
    if setting.ratio is Ratio.SEQUENCE:
        log_ratio = _sequence_means(token_log_ratio, sequence_T, clean.trained_T)
    ratio = _exp(log_ratio)
    objective = _bounded(ratio, advantages, setting)
    policy = clean.sum(-objective)
    divergence = entropy = torch.zeros_like(policy)
    if reference_T is not None:
        divergence = clean.sum(_divergence(new - clean(reference_T).detach(), setting.divergence))
    if entropy_T is not None:
        entropy = clean.sum(clean(entropy_T))
    return PolicyLoss(
        loss=policy + _part(setting.kl_weight, divergence) - _part(setting.entropy_weight, entropy),
        policy=policy.detach(),
        kl=clean.sum(_divergence(-token_log_ratio.detach(), Divergence.K3)),
        divergence=divergence.detach(),
        entropy=entropy.detach(),
        clipped=clean.sum((objective != ratio * advantages).to(clean.dtype)),
        weight=clean.weights_T.sum(),
    )


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, clip: float) -> Tensor:
    """[] half the weighted squared error; only `values_T` gets a gradient.

    With a clip above 0, moving further than that from the old value does not lower the loss.
    """
    _check_shapes(values=values_T, old_values=old_values_T, returns=returns_T, weights=weights_T)
    clean = _Cleaner(weights_T, values_T)
    values, old, returns = clean(values_T), clean(old_values_T).detach(), clean(returns_T).detach()
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return 0.5 * clean.sum(error)


class _Cleaner:
    """Moves tensors to one device and dtype, float32 or better, and zeroes them where the weight is 0."""

    def __init__(self, weights_T: Tensor, like_T: Tensor) -> None:
        self.dtype, self.device = torch.promote_types(like_T.dtype, torch.float32), like_T.device
        self.weights_T = weights_T.detach().to(dtype=self.dtype, device=self.device)
        self.trained_T = self.weights_T != 0

    def __call__(self, numbers_T: Tensor) -> Tensor:
        # before anything is computed, so that neither a NaN nor its gradient passes
        numbers_T = numbers_T.to(dtype=self.dtype, device=self.device)
        return torch.where(self.trained_T, numbers_T, torch.zeros_like(numbers_T))

    def sum(self, numbers_T: Tensor) -> Tensor:
        return (self.weights_T * numbers_T).sum()


def _sequence_means(log_ratio_T: Tensor, sequence_T: Tensor, trained_T: Tensor) -> Tensor:
    """[T] mean log-ratio over the trained tokens of each token's sequence; untrained ones must be 0."""
    sequence_T = sequence_T.to(log_ratio_T.device)
    zeros_S = log_ratio_T.new_zeros(int(sequence_T.max()) + 1 if sequence_T.numel() else 0)
    sums_S = zeros_S.index_add(0, sequence_T, log_ratio_T)
    counts_S = zeros_S.index_add(0, sequence_T, trained_T.to(log_ratio_T.dtype))
    means_T: Tensor = (sums_S / counts_S.clamp(min=1))[sequence_T]
    return means_T


def _bounded(ratio_T: Tensor, advantages_T: Tensor, setting: LossSetting) -> Tensor:
    """[T] the objective after clip and dual clip."""
    clamped = ratio_T.clamp(1 - setting.clip_low, 1 + setting.clip_high)
    objective = torch.minimum(ratio_T * advantages_T, clamped * advantages_T)
    if not setting.dual_clip:
        return objective
    bounded = torch.maximum(objective, setting.dual_clip * advantages_T)
    return torch.where(advantages_T < 0, bounded, objective)


def _divergence(d_T: Tensor, kind: Divergence) -> Tensor:
    """[T] divergence per token; d is the log-ratio of the sampling policy over the other one."""
    if kind is Divergence.K1:
        return d_T
    if kind is Divergence.K2:
        return 0.5 * d_T.square()
    if kind is Divergence.K3:
        d_T = d_T.clamp(min=-MAX_LOG_RATIO)
        return _exp(-d_T) + d_T - 1
    return torch.zeros_like(d_T)


def _part(weight: float, number: Tensor) -> Tensor:
    """A term of the loss; exactly 0 without a weight, as 0 times an infinite gradient is NaN."""
    return weight * number if weight else torch.zeros_like(number)


def _exp(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()


def _check_shapes(**numbers: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in numbers.items() if tensor is not None}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise InputError(f"a loss needs one number per token, in flat tensors of the same length, not {shapes}")
