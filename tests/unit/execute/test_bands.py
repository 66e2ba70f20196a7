"""Bands of tiles: every tile is in one, none is of two instances, and they are about as high as each other."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from equilibra.execute.kernels.grouped import BAND, BM, Groups, bands


@pytest.mark.parametrize("count", [1, 3, 8, 11, 12, 13, 64, 129])
def test_bands_cover_an_instance(count):
    tile = np.arange(count)
    top, height = bands(tile, np.full(count, count))
    assert ((top <= tile) & (tile < top + height)).all()
    tops, first = np.unique(top, return_index=True)
    assert np.array_equal(np.cumsum(height[first]), [*tops[1:], count])
    assert height.max() <= BAND * 3 / 2
    assert height.min() >= min(count, BAND // 2)


def test_no_band_is_of_two_instances():
    sizes = (5 * BM, 0, 1, 20 * BM + 1, 3 * BM)
    groups = Groups.of(sizes, torch.device("cpu"))
    instance, _, _, top, height = groups.tiles.view(5, -1).numpy()
    assert groups.num_tiles == instance.size == 5 + 1 + 21 + 3
    assert np.array_equal(instance[top], instance)
    assert np.array_equal(instance[top + height - 1], instance)
    assert groups.offsets.tolist() == [0, *np.cumsum(sizes)]
