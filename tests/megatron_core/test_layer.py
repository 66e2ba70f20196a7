"""An MoE layer of Megatron under a plan computes what it computes without one."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make setup installs it")

from tests.distributed.ranks import run_ranks
from tests.megatron_core import layer_runs


def test_plain_layer_is_the_loop() -> None:
    assert max(run_ranks(2, layer_runs.plain_against_loop, 2)) < 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_balanced_layer_is_the_plain_one(world: int) -> None:
    for found in run_ranks(world, layer_runs.balanced_against_plain, world):
        assert found["out"] < 1e-5
        assert found["gradient"] < 1e-5
        assert found["outside"] < 1e-6
        assert found["copies"] > 0
        assert found["slowest over mean"] < 1.05 < found["static"]


def test_dropped_gradients_of_copies_are_noticed() -> None:
    found = run_ranks(2, layer_runs.balanced_against_plain, 2, "drop gradients of copies")
    assert max(one["gradient"] for one in found) > 1e-2
    assert max(one["out"] for one in found) < 1e-5
