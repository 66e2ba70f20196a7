"""Generalised advantages by hand and by their definition, for answers that end and answers that go on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import gae_advantages

VALUES = np.array([0.5, 0.6, 0.7])


def test_finished_by_hand():
    # δ2 = 1 - 0.7 = 0.3, δ1 = 0.9·0.7 - 0.6 = 0.03, δ0 = 0.9·0.6 - 0.5 = 0.04; γλ = 0.45
    # A2 = 0.3, A1 = 0.03 + 0.45·0.3 = 0.165, A0 = 0.04 + 0.45·0.165 = 0.11425
    found = gae_advantages(np.array([0.0, 0, 1]), VALUES, discount=0.9, decay=0.5, finished=True)
    assert found == pytest.approx([0.11425, 0.165, 0.3], abs=1e-15)


def test_unfinished_takes_the_last_value_again():
    # δ2 = 0.9·0.7 - 0.7 = -0.07, so A2 = -0.07, A1 = 0.03 - 0.45·0.07 = -0.0015, A0 = 0.04 - 0.45·0.0015 = 0.039325
    found = gae_advantages(np.zeros(3), VALUES, discount=0.9, decay=0.5, finished=False)
    assert found == pytest.approx([0.039325, -0.0015, -0.07], abs=1e-15)
    ended = gae_advantages(np.zeros(3), VALUES, discount=0.9, decay=0.5, finished=True)
    assert abs(ended - found).min() > 0.05  # an end that is not there would blame every token


def test_unfinished_without_discount_leaves_the_last_token_alone():
    assert gae_advantages(np.zeros(3), VALUES, discount=1.0, decay=0.95, finished=False)[-1] == 0


def test_full_decay_is_reward_minus_value():
    found = gae_advantages(np.array([0.0, 0, 2]), VALUES, discount=1.0, decay=1.0, finished=True)
    assert found == pytest.approx(2 - VALUES)


@given(st.data(), st.integers(0, 12), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_definition(data, length, discount, decay, finished):
    numbers = st.lists(st.floats(-5, 5), min_size=length, max_size=length)
    rewards, values = data.draw(numbers), data.draw(numbers)
    after = [*values[1:], 0.0 if finished or not values else values[-1]]
    deltas = [rewards[t] + discount * after[t] - values[t] for t in range(length)]
    wanted = [sum((discount * decay) ** (i - t) * deltas[i] for i in range(t, length)) for t in range(length)]
    found = gae_advantages(np.array(rewards), np.array(values), discount=discount, decay=decay, finished=finished)
    assert found.dtype == np.float64
    assert found == pytest.approx(wanted, abs=1e-12)


def test_values_of_another_type_are_computed_in_float64():
    narrow = VALUES.astype(np.float32)
    found = gae_advantages(np.zeros(3), narrow, discount=1.0, decay=0.95, finished=True)
    assert found == pytest.approx(
        gae_advantages(np.zeros(3), narrow.astype(np.float64), discount=1.0, decay=0.95, finished=True), abs=0
    )


def test_every_token_needs_a_reward():
    with pytest.raises(InputError, match=r"a reward and a value for each token, not \(2,\) and \(3,\)"):
        gae_advantages(np.zeros(2), VALUES, discount=1.0, decay=0.9, finished=True)
