"""Critic: a value model of the policy's shape, with experts, a balancer and an optimizer of its own.

The rollout says nothing of its routing. So its first pass over a step's samples, which gives the values that advantages
need, is routed live and written down; its update replays that, planned and balanced like the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from equilibra.rl.algorithms.algorithm import Algorithm, Target
from equilibra.rl.learner import Learner
from equilibra.rl.loss import Total
from equilibra.rl.sample import Sample
from equilibra.rl.updates import MiniBatches, value_columns, value_loss_of

__all__ = ["Critic"]


class Critic:
    """Values of a step's samples, then an update towards their returns."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._values: list[NDArray[np.float64]] = []
        self._experts: list[NDArray[np.int32]] = []

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Collective: [A] of every own sample, forward only."""
        self._values, self._experts = self.learner.begin_live(samples).logprobs_and_experts()
        return self._values

    def update(
        self, samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], parts: MiniBatches,
        total: Total, sums: Sequence[Mapping[str, float]],
    ) -> list[dict[str, float]]:  # fmt: skip
        """Collective: learn the returns of the samples that `values` was asked for; adds to what is reported."""
        batch = self.learner.begin(samples, parts.of_sample, experts=self._experts)
        batch.give(value_columns(samples, algorithm, targets, self._values, parts, total))
        loss = partial(value_loss_of, algorithm.value_clip)
        updates = [batch.update(mini_batch, loss) for mini_batch in parts.order]
        return [
            {**of_policy, "value_loss": own.get("value_loss", 0.0), "skipped": of_policy["skipped"] + own["skipped"]}
            for own, of_policy in zip(updates, sums, strict=True)
        ]
