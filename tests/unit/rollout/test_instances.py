"""Instances of experts: shares hold for any run of pairs, and the planner's copies level the processes."""

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import imbalance
from equilibra.rollout.instances import Instances, homes_only, plan_instances


def skewed(num_layers=3, num_experts=16, seed=0):
    random = np.random.default_rng(seed)
    return random.permuted(np.geomspace(1, 400, num_experts).astype(np.int64) * np.ones((num_layers, 1), int), axis=1)


def imbalance_of(rows_LN):
    return imbalance(rows_LN).mean()


def rows_of(instances, tokens_LE, *, at_once, seed=0):
    """[L, N] pairs that every process gets if they come in small pieces in random order."""
    random = np.random.default_rng(seed)
    rows = np.zeros((len(tokens_LE), instances.num_processes), np.int64)
    for layer, tokens_E in enumerate(tokens_LE):
        pairs, count = random.permutation(np.repeat(np.arange(tokens_E.size), tokens_E)), np.zeros(tokens_E.size, int)
        for first in range(0, pairs.size, at_once):
            piece = pairs[first : first + at_once]
            process = instances.choose(layer, piece, count)
            for expert, one in zip(piece.tolist(), process.tolist(), strict=True):
                assert expert in instances.experts_on(one, layer)
            rows[layer] += np.bincount(process, minlength=instances.num_processes)
    return rows


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
@pytest.mark.parametrize("num_processes", [2, 3, 5])
def test_copies_level_processes_for_any_size_of_message(num_processes, at_once):
    tokens = skewed()
    alone = imbalance_of(rows_of(homes_only(3, 16, num_processes), tokens, at_once=at_once))
    planned = plan_instances(tokens, num_processes, spare_slots=2)
    assert imbalance_of(rows_of(planned, tokens, at_once=at_once)) < 1.05 < 1.15 < alone
    for layer in range(3):
        assert all(len(planned.copies_on(process, layer)) <= 2 for process in range(num_processes))
        assert sorted({e for p in range(num_processes) for e in planned.experts_on(p, layer)}) == list(range(16))


def test_without_slots_or_tokens_everybody_stays_at_home():
    for planned in (plan_instances(skewed(), 4, spare_slots=0), plan_instances(skewed() * 0, 4, spare_slots=2)):
        assert all(planned.copies_on(process, 0) == [] for process in range(4))


def test_shares_that_are_ignored_leave_the_skew():
    """Control."""
    tokens = skewed()
    planned = plan_instances(tokens, 3, spare_slots=2)
    ignored = Instances(
        process_LEI=planned.process_LEI, until_LEI=np.ones_like(planned.until_LEI), num_processes=3
    )  # fmt: skip
    assert imbalance_of(rows_of(ignored, tokens, at_once=7)) > 1.15


def test_more_processes_than_experts_are_refused():
    with pytest.raises(InputError, match="cannot spread 4 experts over 5 expert processes: use at most 4"):
        homes_only(1, 4, 5)
