"""GRPO's advantages by hand, and its variants."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import Grpo, group_advantages
from equilibra.rl.engine import Sample
from equilibra.rl.loss import Average, Ratio


def answer(reward, *, group=0, length=2):
    empty = Sample(problem=0, group=group, number=0, prompt=np.array([1, 2]))
    grown = empty.grown(
        answer=np.full(length, 5), logprobs=np.full(length, -1.0), experts=np.zeros((length + 1, 1, 1), np.int32),
        version=0, finished=True,
    )  # fmt: skip
    return replace(grown, reward=reward)


def no_total(array):
    raise AssertionError("groups are whole: nothing is summed over ranks")


def advantages(rewards, algorithm=None):
    targets = (algorithm or Grpo()).targets([answer(reward) for reward in rewards], None, no_total)
    return [float(target.advantages[0]) for target in targets]


def test_by_hand():
    # mean 1; standard deviation √((1 + 0 + 1) / 2) = 1, and 1e-6 on top
    assert advantages([0.0, 1.0, 2.0]) == pytest.approx([-1 / 1.000001, 0, 1 / 1.000001], rel=1e-12)


def test_by_hand_of_four():
    # mean ¼; deviations -¼ (three times) and ¾; √((3/16 + 9/16) / 3) = ½
    assert advantages([0, 0, 1, 0]) == pytest.approx([-0.5, -0.5, 1.5, -0.5], rel=1e-5)


def test_without_the_mean_it_would_be_another_algorithm():
    rewards = np.array([0.0, 1.0, 2.0])
    found = advantages(rewards)
    assert found != pytest.approx(rewards / (rewards.std(ddof=1) + 1e-6))
    assert found != pytest.approx((rewards - 1) / (rewards.std() + 1e-6), rel=1e-3)  # nor with n in the deviation


def test_every_token_of_an_answer_gets_the_same():
    targets = Grpo().targets([answer(1.0, length=3), answer(0.0, length=1)], None, no_total)
    # mean ½, standard deviation √(2 · ¼) = √½
    assert targets[0].advantages == pytest.approx([0.5**0.5] * 3, rel=1e-5)
    assert targets[1].advantages == pytest.approx([-(0.5**0.5)], rel=1e-5)
    assert all(target.returns is None for target in targets)


def test_groups_are_apart_in_any_order():
    mixed = [answer(0.0, group=7), answer(5.0, group=-1), answer(1.0, group=7), answer(9.0, group=-1)]
    found = [target.advantages[0] for target in Grpo(normalise=False).targets(mixed, None, no_total)]
    assert found == pytest.approx([-0.5, -2.0, 0.5, 2.0])


def test_equal_rewards_and_groups_of_one_say_nothing():
    assert advantages([0.1, 0.1, 0.1]) == [0, 0, 0]  # exactly, though the rounded mean is not 0.1
    assert np.mean([0.1, 0.1, 0.1]) != 0.1
    assert advantages([3.0]) == [0]
    assert advantages([0.1] * 3, Grpo(leave_one_out=True, normalise=False)) == [0, 0, 0]
    assert Grpo().targets([], None, no_total) == []


def test_dr_grpo_keeps_the_size_of_rewards():
    assert advantages([0.0, 1.0, 2.0], Grpo(normalise=False)) == pytest.approx([-1, 0, 1])
    assert advantages([0.0, 4.0], Grpo(normalise=False)) == pytest.approx([-2, 2])
    assert advantages([0.0, 4.0]) == pytest.approx(advantages([0.0, 1.0]), rel=1e-5)  # the others do not


def test_leave_one_out_by_hand():
    # 0 - (1 + 2) / 2, 1 - (0 + 2) / 2, 2 - (0 + 1) / 2
    rloo = Grpo(leave_one_out=True, normalise=False)
    assert advantages([0.0, 1.0, 2.0], rloo) == pytest.approx([-1.5, 0, 1.5])
    rewards = np.array([0.3, -1.0, 2.5, 0.0, 0.7])
    wanted = [reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]
    assert group_advantages(rewards, normalise=False, leave_one_out=True) == pytest.approx(wanted)


def test_all_answer_tokens_are_trained_and_no_values():
    algorithm, sample = Grpo(), answer(1.0, length=3)
    assert algorithm.policy_mask(sample).tolist() == [True] * 3
    assert algorithm.value_mask(sample).tolist() == [False] * 3
    assert (algorithm.name, algorithm.needs_values, algorithm.windowed) == ("grpo", False, False)


def test_loss():
    loss = Grpo().loss
    assert (loss.clip_low, loss.clip_high, loss.ratio, loss.average) == (0.2, 0.28, Ratio.TOKEN, Average.TOKEN)


def test_errors():
    with pytest.raises(InputError, match="grpo cannot train on 1 unfinished answers"):
        Grpo().targets([answer(1.0), replace(answer(1.0), finished=False)], None, no_total)
    with pytest.raises(InputError, match="normalise of grpo must be true or false, not 'no'"):
        Grpo(normalise="no")
