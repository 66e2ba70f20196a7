"""Buffers of rows that are on their way."""

import pytest

torch = pytest.importorskip("torch")

from equilibra.execute.copies.transfer import Staging  # noqa: E402
from equilibra.execute.group import Ready, Then  # noqa: E402

ROW = torch.zeros(6, dtype=torch.float64)


def test_a_buffer_comes_again_when_what_it_carried_has_arrived():
    staging = Staging(ROW)
    staging.expect(3)
    first = staging.take()
    assert (first.shape, first.dtype) == ((3, 6), torch.float64)
    moving = Then(Ready(), lambda: staging.give_back(first))
    second = staging.take()
    assert second.data_ptr() != first.data_ptr(), "the first is on its way"
    moving.wait()
    moving.wait()  # as often as one likes
    assert staging.take() is first
    assert staging.take() is not first, "it was given back once"
    assert staging.num_bytes == 3 * first.nbytes


def test_buffers_grow_with_the_largest_list_and_small_ones_are_given_up():
    staging = Staging(ROW)
    staging.expect(2)
    idle, moving = staging.take(), staging.take()
    staging.give_back(idle)
    staging.expect(5)
    assert staging.num_bytes == moving.nbytes
    staging.give_back(moving)
    assert staging.num_bytes == 0
    assert len(staging.take()) == 5
    staging.expect(1)
    assert len(staging.take()) == 5, "plans with smaller lists keep what is there"
