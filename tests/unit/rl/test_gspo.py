"""GSPO: one ratio per sequence, by hand."""

from math import log

import numpy as np
import pytest
import torch

from equilibra.rl.algorithms import Grpo, Gspo
from equilibra.rl.loss import Average, Ratio, policy_loss, token_weights


def loss_of(algorithm):
    """Sequence 0: ratios 4 and 1, advantage 1. Sequence 1: ratios 2, 1 and 4, advantage -1."""
    new = torch.tensor([log(4), 0, log(2), 0, log(4)], dtype=torch.float64, requires_grad=True)
    zeros, sequence = torch.zeros(5, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    masks = [np.ones(2, bool), np.ones(3, bool)]
    weights = torch.from_numpy(np.concatenate(token_weights(masks, algorithm.loss, lambda array: array, 10)))
    found = policy_loss(new, zeros, advantages, weights, sequence, algorithm.loss)
    found.loss.backward()
    return found, new.grad.tolist()


def test_by_hand():
    # s_0 = √(4·1) = 2, clipped to 1.0004; s_1 = ∛(2·1·4) = 2, not clipped as it is bad: (-1.0004 + 2) / 2
    found, gradient = loss_of(Gspo())
    assert found.loss.item() == pytest.approx(0.4998, abs=1e-12)
    assert found.clipped.item() == pytest.approx(0.5)
    # sequence 1: half the loss, s_1 = 2, shared by three tokens alike
    assert gradient == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3], abs=1e-12)


def test_tokens_of_grpo_differ():
    found, gradient = loss_of(Grpo())
    # (-1.28 - 1 + 2 + 1 + 4) / 5; each token its own gradient, the clipped one none
    assert found.loss.item() == pytest.approx(4.72 / 5)
    assert gradient == pytest.approx([0, -1 / 5, 2 / 5, 1 / 5, 4 / 5])


def test_setting():
    algorithm = Gspo(normalise=False)
    loss = algorithm.loss
    assert (loss.clip_low, loss.clip_high) == (3e-4, 4e-4)
    assert (loss.ratio, loss.average) == (Ratio.SEQUENCE, Average.SEQUENCE)
    assert (algorithm.name, algorithm.needs_values, algorithm.windowed) == ("gspo", False, False)
    assert Gspo.targets is Grpo.targets  # the same advantages
