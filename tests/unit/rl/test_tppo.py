"""T-PPO: what is trained in which window, extended advantages by hand, and batches that stay full."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import Tppo
from equilibra.rl.engine import Sample


def answer(*windows, finished, reward=0.0, number=0):
    """An answer that grew by so many tokens in each window."""
    grown = Sample(problem=0, group=0, number=number, prompt=np.array([1, 2]))
    for version, length in enumerate(windows):
        grown = grown.grown(
            answer=np.full(length, 5), logprobs=np.full(length, -1.0), version=version,
            experts=np.zeros((grown.answer.size + length + 1, 1, 1), np.int32),
            finished=finished and version == len(windows) - 1,
        )  # fmt: skip
    return replace(grown, reward=reward)


def alone(array):
    return array


GOES_ON = answer(2, 1, finished=False, reward=9.0)  # its reward is not known yet, whatever stands there
ENDED = answer(1, 2, finished=True, reward=1.0)
VALUES = [np.array([0.2, 0.4, 0.5]), np.array([0.5, 0.6, 0.8])]
PLAIN = Tppo(whiten=False, discount=0.9, decay=0.5)


def test_policy_trains_on_the_newest_window_only():
    assert Tppo().policy_mask(GOES_ON).tolist() == [False, False, True]
    assert Tppo().policy_mask(ENDED).tolist() == [False, True, True]
    assert Tppo().policy_mask(answer(3, finished=False)).tolist() == [True, True, True]
    assert Tppo().policy_mask(answer(finished=False)).tolist() == []


def test_every_token_is_trained_once():
    seen = [Tppo().policy_mask(answer(*[2, 3, 1][: windows + 1], finished=windows == 2)) for windows in range(3)]
    counts = sum(np.pad(mask.astype(int), (0, 6 - mask.size)) for mask in seen)
    assert counts.tolist() == [1] * 6


def test_values_train_on_all_of_finished_answers_only():
    assert Tppo().value_mask(GOES_ON).tolist() == [False] * 3
    assert Tppo().value_mask(ENDED).tolist() == [True] * 3


def test_advantages_by_hand():
    going, ended = PLAIN.targets([GOES_ON, ENDED], VALUES, alone)
    # goes on, γλ = 0.45: δ2 = 0.9·0.5 - 0.5 = -0.05, δ1 = 0.9·0.5 - 0.4 = 0.05, δ0 = 0.9·0.4 - 0.2 = 0.16
    # A2 = -0.05, A1 = 0.05 - 0.0225 = 0.0275, A0 = 0.16 + 0.012375 = 0.172375
    assert going.advantages == pytest.approx([0.172375, 0.0275, -0.05])
    # ended: δ2 = 1 - 0.8 = 0.2, δ1 = 0.9·0.8 - 0.6 = 0.12, δ0 = 0.9·0.6 - 0.5 = 0.04
    # A2 = 0.2, A1 = 0.12 + 0.09 = 0.21, A0 = 0.04 + 0.0945 = 0.1345
    assert ended.advantages == pytest.approx([0.1345, 0.21, 0.2])
    assert ended.returns == pytest.approx([0.6345, 0.81, 1.0])


def test_an_end_that_is_not_there_would_differ():
    going, pretended = (
        PLAIN.targets([sample], VALUES[:1], alone)[0].advantages
        for sample in (GOES_ON, replace(GOES_ON, finished=True, reward=0.0))
    )
    assert abs(going - pretended).min() > 0.05


def test_whitening_is_over_the_newest_windows():
    going, ended = replace(PLAIN, whiten=True).targets([GOES_ON, ENDED], VALUES, alone)
    trained = np.array([-0.05, 0.21, 0.2])
    wanted = (trained - trained.mean()) / (trained.std() + 1e-6)
    assert [*going.advantages[2:], *ended.advantages[1:]] == pytest.approx(wanted)
    assert ended.returns == pytest.approx([0.6345, 0.81, 1.0])


def test_setting():
    assert (Tppo().name, Tppo().needs_values, Tppo().windowed) == ("tppo", True, True)
    with pytest.raises(InputError, match="decay of tppo must be"):
        Tppo(decay=2.0)
