"""What rounding explains, and what is said where it does not."""

import pytest
import torch

from equilibra.core.errors import MismatchError
from equilibra.integrations.differences import (
    Difference,
    apart,
    check,
    gradient_limit,
    largest,
    of_all_ranks,
    table,
)


def test_differences_are_relative_to_the_root_mean_square() -> None:
    wanted, found = [torch.tensor([3.0, 4.0]), torch.zeros(2)], [torch.tensor([3.0, 4.5]), torch.tensor([0.0, 1.0])]
    size = (25 / 2) ** 0.5
    assert apart(wanted, found) == pytest.approx([0.5 / size, 1 / size])
    assert apart(wanted[1:], found[1:]) == [1.0], "absolute where there was nothing"
    assert apart([], []) == []


def test_the_largest_is_named_and_numbers_that_are_not_finite_are_never_rounding() -> None:
    assert largest("gradients", {}, 0.0).is_rounding
    assert largest("gradients", {"a": 0.1, "b": 0.2}, 0.2) == Difference(
        what="gradients", found=0.2, allowed=0.2, where="b"
    )
    for number in (float("nan"), float("inf")):
        found = largest("gradients", {"a": 0.1, "b": number, "c": 0.2}, gradient_limit(2**-8, num_layers=100))
        assert found.where == "b"
        assert not found.is_rounding
    nan = apart([torch.ones(2)], [torch.tensor([1.0, float("nan")])])
    assert not largest("gradients", {"a": nan[0]}, 1e9).is_rounding


def test_what_is_more_than_rounding_is_said() -> None:
    good, bad = largest("outputs", {"x": 1e-7}, 1e-6), largest("gradients", {"w": 1e-2}, 1e-6)
    check([good])
    assert of_all_ranks([good, bad]) == [good, bad]
    rows = table([good, bad]).splitlines()
    assert rows[1].endswith("1.0e-06")
    assert rows[2].endswith("MORE THAN ROUNDING: w")
    with pytest.raises(MismatchError, match="more than rounding, most in w;"):
        check([good, bad])
