"""A GPTModel under Megatron's schedules, DDP and DistributedOptimizer learns the same, balanced or not."""

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make setup installs it")

from tests.distributed.ranks import run_ranks
from tests.megatron_core import gpt_runs


def same(found: list[dict], *, moves: bool = True) -> None:
    assert any(one["plain"][0] for one in found)
    for one in found:
        np.testing.assert_allclose(one["balanced"], one["plain"], rtol=2e-6)
        assert one["weights"] < 1e-5
        assert one["copies"] > 0
        assert (one["moves"] > 0) == moves
        assert one["planned"] < 1.1 < one["static"]


def test_experts_on_two_ranks_and_two_replicas_with_full_recompute() -> None:
    same(run_ranks(4, gpt_runs.against_plain, 2, 1, gpt_runs.FULL))
