"""PPO: advantages, whitening and returns by hand."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import Ppo, token_rewards, whitened
from equilibra.rl.engine import Sample


def answer(reward, length):
    empty = Sample(problem=0, group=0, number=0, prompt=np.array([1, 2]))
    grown = empty.grown(
        answer=np.full(length, 5), logprobs=np.full(length, -1.0), experts=np.zeros((length + 1, 1, 1), np.int32),
        version=0, finished=True,
    )  # fmt: skip
    return replace(grown, reward=reward)


def alone(array):
    return array


SAMPLES = [answer(1.0, 2), answer(0.0, 1)]
VALUES = [np.array([0.5, 0.5]), np.array([0.5])]
# sample 0: δ1 = 1 - 0.5 = 0.5, δ0 = 0.5 - 0.5 = 0, so A1 = 0.5, A0 = 0.95 · 0.5 = 0.475; sample 1: A0 = 0 - 0.5
PLAIN = [[0.475, 0.5], [-0.5]]
RETURNS = [[0.975, 1.0], [0.0]]


def test_by_hand_without_whitening():
    targets = Ppo(whiten=False).targets(SAMPLES, VALUES, alone)
    assert [target.advantages.tolist() for target in targets] == [pytest.approx(one) for one in PLAIN]
    assert [target.returns.tolist() for target in targets] == [pytest.approx(one) for one in RETURNS]


def test_by_hand_whitened():
    targets = Ppo().targets(SAMPLES, VALUES, alone)
    # mean 0.475 / 3; the squares of deviations add up to 0.475² + 0.5² + 0.5² - 0.475² / 3
    mean, std = 0.475 / 3, ((0.475**2 * 2 / 3 + 0.5) / 3) ** 0.5
    wanted = [[(a - mean) / (std + 1e-6) for a in one] for one in PLAIN]
    assert [target.advantages.tolist() for target in targets] == [pytest.approx(one) for one in wanted]
    together = np.concatenate([target.advantages for target in targets])
    assert together.mean() == pytest.approx(0, abs=1e-12)
    assert together.std() == pytest.approx(1, rel=1e-5)
    assert [target.returns.tolist() for target in targets] == [pytest.approx(one) for one in RETURNS]  # as without


def test_options_matter():
    changed = Ppo(whiten=False, decay=0.5, discount=0.8).targets(SAMPLES, VALUES, alone)
    # A1 = 0.5, δ0 = 0.8 · 0.5 - 0.5 = -0.1, A0 = -0.1 + 0.4 · 0.5 = 0.1
    assert changed[0].advantages == pytest.approx([0.1, 0.5])


def test_reward_is_on_the_last_token():
    assert token_rewards(answer(3.0, 3)).tolist() == [0, 0, 3]
    assert token_rewards(replace(answer(3.0, 3), finished=False)).tolist() == [0, 0, 0]
    assert token_rewards(answer(3.0, 0)).tolist() == []


def test_whitening_of_nothing_and_of_equal_numbers():
    assert whitened([], [], alone) == []
    same = whitened([np.full(2, 3.0), np.full(1, 3.0)], [np.ones(2, bool), np.ones(1, bool)], alone)
    assert [one.tolist() for one in same] == [[0, 0], [0]]


def test_whitening_counts_masked_numbers_only():
    (found,) = whitened([np.array([1.0, 3.0, 99.0])], [np.array([True, True, False])], alone)
    assert found[:2] == pytest.approx([-1, 1], rel=1e-5)


def test_every_rank_sums_twice_also_without_samples():
    calls = []

    def total(array):
        calls.append(array.size)
        return array

    assert Ppo().targets([], [], total) == []
    Ppo().targets(SAMPLES, VALUES, total)
    assert calls == [2, 1, 2, 1]


def test_masks_and_setting():
    algorithm = Ppo()
    assert algorithm.policy_mask(SAMPLES[0]).tolist() == [True, True]
    assert algorithm.value_mask(SAMPLES[0]).tolist() == [True, True]
    assert (algorithm.name, algorithm.needs_values, algorithm.windowed) == ("ppo", True, False)
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high, algorithm.value_clip) == (0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decay": 1.1}, "decay of ppo must be a number from 0 to 1, not 1.1"),
        ({"discount": -0.1}, "discount of ppo must be a number from 0 to 1, not -0.1"),
        ({"discount": "all"}, "discount of ppo must be a number from 0 to 1, not 'all'"),
        ({"value_clip": float("inf")}, "value_clip of ppo must be a number from 0 .*, not inf"),
        ({"whiten": 1}, "whiten of ppo must be true or false, not 1"),
    ],
)
def test_settings_check_themselves(options, words):
    with pytest.raises(InputError, match=words):
        Ppo(**options)


def test_errors():
    with pytest.raises(InputError, match="ppo needs the values of 2 answers, token by token, not none"):
        Ppo().targets(SAMPLES, None, alone)
    with pytest.raises(InputError, match="ppo needs the values of 2 answers, token by token, not those of 1"):
        Ppo().targets(SAMPLES, VALUES[:1], alone)
    with pytest.raises(InputError, match="a reward and a value for each token"):
        Ppo().targets(SAMPLES, VALUES[::-1], alone)
    with pytest.raises(InputError, match="ppo cannot train on 1 unfinished answers"):
        Ppo().targets([replace(SAMPLES[0], finished=False)], VALUES[:1], alone)
