"""From targets to updates: the columns [A, C] that each sample sends to the loss, the losses, and the critic.

Policy columns: old log-probability, advantage, weight, reference log-probability. Value columns: old value, return,
weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import Algorithm, Target
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Learner, LossSums, Predictions
from equilibra.rl.loss import Divergence, LossSetting, Total, policy_loss, token_weights, value_loss

POLICY_SUMS = ("loss", "policy", "kl", "divergence", "entropy", "clipped", "weight")
"""statistics of the policy loss; a rank whose group ran nothing reports none"""

Numbers = Sequence[NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class MiniBatches:
    """Which samples share an optimizer step: by group, whatever the plan and the number of ranks."""

    of_sample: NDArray[np.int64]
    """[S] mini-batch of each own sample"""
    number: int
    epochs: int
    """passes over all mini-batches"""

    @classmethod
    def of(cls, samples: Sequence[Sample], number: int, epochs: int, *, places: int = 0) -> MiniBatches:
        """Deal groups out in turn.

        places: answers that grow window by window. A place's groups are `places` apart, so places are dealt out
        instead: by group alone a mini-batch could be empty.
        """
        turns = [sample.group % places if places else sample.group for sample in samples]
        chosen = np.array(turns, np.int64) % number
        return cls(of_sample=chosen, number=number, epochs=epochs)

    @property
    def order(self) -> list[int]:
        return list(range(self.number)) * self.epochs


def _weights(
    masks: Sequence[NDArray[np.bool_]], parts: MiniBatches, setting: LossSetting, total: Total, max_length: int
) -> list[NDArray[np.float64]]:
    """[A] token weights of every sample within its mini-batch."""
    found: dict[int, NDArray[np.float64]] = {}
    for mini_batch in range(parts.number):
        chosen = np.flatnonzero(parts.of_sample == mini_batch).tolist()
        weights = token_weights([masks[i] for i in chosen], setting, total, max_length)
        found.update(zip(chosen, weights, strict=True))
    return [found[i] for i in range(len(masks))]


def policy_columns(
    samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], old: Numbers, reference: Numbers | None,
    parts: MiniBatches, total: Total, max_length: int,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Collective: [A, 4] of every own sample."""
    masks = [algorithm.policy_mask(sample) for sample in samples]
    weights = _weights(masks, parts, algorithm.loss, total, max_length)
    if reference is None:
        if algorithm.loss.divergence is not Divergence.NONE:
            raise InputError(f"a loss with divergence {algorithm.loss.divergence} needs a reference policy")
        reference = old
    return [
        np.stack([old[i], targets[i].advantages, weights[i], reference[i]], axis=1) for i in range(len(samples))
    ]  # fmt: skip


def value_columns(
    samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], values: Numbers, parts: MiniBatches,
    total: Total,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Collective: [A, 3] of every own sample."""
    masks = [algorithm.value_mask(sample) for sample in samples]
    weights = _weights(masks, parts, LossSetting(), total, 1)
    returns = [values[i] if target.returns is None else target.returns for i, target in enumerate(targets)]
    return [np.stack([values[i], returns[i], weights[i]], axis=1) for i in range(len(samples))]


def policy_loss_of(setting: LossSetting, predictions: Predictions, columns_NC: Tensor) -> LossSums:
    """The policy loss of a micro-batch, from its columns."""
    old, advantages, weights, reference = columns_NC.unbind(dim=1)
    part = policy_loss(
        predictions.logprobs, old, advantages, weights, predictions.sequence, setting,
        reference_T=None if setting.divergence is Divergence.NONE else reference, entropy_T=predictions.entropy,
    )  # fmt: skip
    return LossSums(loss=part.loss, sums={name: float(getattr(part, name).detach()) for name in POLICY_SUMS})


def value_loss_of(clip: float, predictions: Predictions, columns_NC: Tensor) -> LossSums:
    """The value loss of a micro-batch, from its columns."""
    old, returns, weights = columns_NC.unbind(dim=1)
    loss = value_loss(predictions.logprobs, old, returns, weights, clip)
    return LossSums(loss=loss, sums={"value_loss": float(loss.detach())})


class Critic:
    """A value model with its own experts, balancer and optimizer.

    The rollout knows nothing of its routing. So the pass that computes the values of a step is routed live and
    recorded; the update replays that routing, planned and balanced like the policy's.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._values: list[NDArray[np.float64]] = []
        self._experts: list[NDArray[np.int32]] = []

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Collective: values [A] of every own sample, forward only."""
        self._values, self._experts = self.learner.begin_live(samples).logprobs_and_experts()
        return self._values

    def update(
        self, samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], parts: MiniBatches,
        total: Total, sums: Sequence[Mapping[str, float]],
    ) -> list[dict[str, float]]:  # fmt: skip
        """Collective: train towards the returns, after `values` of the same samples; extends the policy's sums."""
        batch = self.learner.begin(samples, parts.of_sample, experts=self._experts)
        batch.give(value_columns(samples, algorithm, targets, self._values, parts, total))
        loss = partial(value_loss_of, algorithm.value_clip)
        updates = [batch.update(mini_batch, loss) for mini_batch in parts.order]
        return [
            {**of_policy, "value_loss": own.get("value_loss", 0.0), "skipped": of_policy["skipped"] + own["skipped"]}
            for own, of_policy in zip(updates, sums, strict=True)
        ]
