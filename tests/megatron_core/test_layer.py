"""An MoE layer of Megatron under a plan computes what it computes without one."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make setup installs it")

from tests.distributed.ranks import run_ranks
from tests.megatron_core import layer_runs


def test_plain_layer_is_the_loop() -> None:
    assert max(run_ranks(2, layer_runs.plain_against_loop, 2)) < 1e-5
