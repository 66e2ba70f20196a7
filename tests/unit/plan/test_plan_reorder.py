"""Reordering against all homes there are."""

import numpy as np
import pytest

from equilibra.plan.reorder import quantized, reorder_bins
from references.homes import all_homes, best_homes, cost_of_homes


def instance(seed):
    rng = np.random.default_rng(seed)
    num_bins, num_experts = [(2, 4), (2, 6), (2, 8), (3, 6), (3, 9)][seed % 5]
    num_micro_batches = int(rng.integers(1, 5))
    home0 = rng.permutation(np.repeat(np.arange(num_bins), num_experts // num_bins)).astype(np.int64)
    time = rng.integers(0, 1000, (num_bins, num_experts, num_micro_batches)).astype(np.int32)
    if seed % 2:  # the same everywhere, as without traffic
        time[:] = time[0]
    base = rng.integers(0, 300, (num_bins, num_micro_batches)).astype(np.int32)
    return home0, base, time, int(rng.choice([0, 20, 200, 5000]))


def test_the_reference_counts_all_homes():
    assert sum(1 for _ in all_homes(6, 3)) == 90
    assert sum(1 for _ in all_homes(8, 2)) == 70


@pytest.mark.parametrize("max_moves", [-1, 0, 2, 4])
def test_the_best_homes_are_found_within_the_migration_budget(max_moves):
    over = []
    for seed in range(25):
        home0, base, time, price = instance(seed)
        home, cost = reorder_bins(home0, base, time, price, 3_000, seed, max_moves)
        assert cost == cost_of_homes(home, home0, base, time, price)
        assert cost <= cost_of_homes(home0, home0, base, time, price), "worse than staying"
        np.testing.assert_array_equal(np.bincount(home), np.bincount(home0))
        assert max_moves < 0 or np.count_nonzero(home != home0) <= max_moves
        over.append(cost / best_homes(home0, base, time, price, max_moves) - 1)
    assert np.mean(over) <= 0.001, np.round(over, 4)
    assert max(over) <= 0.02, np.round(over, 4)


def test_a_price_above_every_gain_keeps_all_homes():
    for seed in range(10):
        home0, base, time, _ = instance(seed)
        home, _ = reorder_bins(home0, base, time, 10**9, 3_000, seed, -1)
        np.testing.assert_array_equal(home, home0)


def test_the_same_seed_finds_the_same_homes_and_arguments_are_left_alone():
    home0, base, time, price = instance(4)
    copies = home0.copy(), base.copy(), time.copy()
    first, _ = reorder_bins(home0, base, time, price, 3_000, 5, -1)
    second, _ = reorder_bins(home0, base, time, price, 3_000, 5, -1)
    np.testing.assert_array_equal(first, second)
    for now, before in zip((home0, base, time), copies, strict=True):
        np.testing.assert_array_equal(now, before)


def test_one_bin_stays():
    home, cost = reorder_bins(
        np.zeros(3, np.int64), np.ones((1, 2), np.int32), np.full((1, 3, 2), 5, np.int32), 1, 100, 0, -1
    )
    assert home.tolist() == [0, 0, 0]
    assert cost == 32


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e12])
def test_quantized_times_keep_their_proportions_and_never_overflow(scale):
    rng = np.random.default_rng(0)
    time = rng.random((3, 64, 16)) * scale
    whole, unit = quantized(time)
    assert whole.dtype == np.int32
    np.testing.assert_allclose(whole * unit, time, atol=unit)
    assert whole.max(axis=0).sum(dtype=np.int64) < 2**30


def test_zero_times_are_zero_and_have_a_unit_that_prices_can_be_counted_in():
    whole, unit = quantized(np.zeros((2, 4, 3)))
    assert not whole.any()
    assert 0 <= 1e6 / unit < 2**62, "the price of a move must fit an int64"
