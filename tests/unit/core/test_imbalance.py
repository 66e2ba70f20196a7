import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import imbalance, spread


def test_worked_example():
    load = np.array([[[4, 0], [1, 1]], [[0, 4], [3, 1]]])  # [M=2, L=2, R=2]
    assert imbalance(load).tolist() == [[2.0, 1.0], [2.0, 1.5]]
    assert imbalance(load.sum(axis=0)).tolist() == [1.0, 4 / 3]
    found = spread(imbalance(load))
    assert found.mean == 6.5 / 4
    assert found.worst == 2.0
    assert 1.5 < found.p99 <= 2.0


def test_no_load_is_balanced():
    assert imbalance(np.zeros((3, 4), dtype=np.int32)).tolist() == [1.0, 1.0, 1.0]


def test_large_loads_do_not_overflow():
    assert imbalance(np.full(3, 2**31 - 1, dtype=np.int32)) == 1.0


@pytest.mark.parametrize("load", [np.array([1.0, np.nan]), np.array([-1, 2]), np.zeros((3, 0)), np.array(3)])
def test_what_is_no_load_is_refused(load):
    with pytest.raises(InputError):
        imbalance(load)
