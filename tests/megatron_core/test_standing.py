"""Standing copies across simulated nodes: Megatron learns what it learns without them."""

from dataclasses import replace

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import gpt_runs, layer_runs
from tests.megatron_core.gpt_runs import FULL, SELECTIVE, Case
from tests.megatron_core.test_gpt import apart

CASE = Case(expert_parallel=4, standing_slots=2, per_node=2)


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_layer_with_both_kinds_of_copies(per_node: int) -> None:
    for found in run_ranks(4, layer_runs.across_nodes, per_node):
        assert found["out"] < 1e-5
        assert found["gradient"] < 1e-5
        assert found["standing"] > 0
        assert (found["copies"] > 0) == (per_node > 1)
        assert found["planned"] < 1.2 < found["static"]


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, per_node=1),
        pytest.param(replace(CASE, options=FULL), marks=pytest.mark.slow),
        pytest.param(replace(CASE, options=SELECTIVE, overlap=True), marks=pytest.mark.slow),
        replace(CASE, fused=True, overlap=True, gather=True, homes="shuffled", options=FULL),
        pytest.param(replace(CASE, expert_parallel=2, per_node=1, options=FULL, overlap=True), marks=pytest.mark.slow),
        replace(CASE, expert_parallel=2, per_node=1, pipeline=2, num_layers=4),
    ],
    ids=["one rank a node", "full", "selective, overlapped", "all at once", "two replicas", "pipeline"],
)
def test_training_is_the_same(case: Case) -> None:
    found = run_ranks(4, gpt_runs.against_plain, case)
    assert any(one["plain"][0] for one in found)
    for one in found:
        np.testing.assert_allclose(one["balanced"], one["plain"], rtol=2e-6)
        assert one["weights"] < 2e-5
        assert one["standing"] > 0
        assert one["planned"] < one["static"] - 0.1


def test_dropped_gradients_of_standing_copies_are_noticed() -> None:
    apart(run_ranks(4, gpt_runs.against_plain, replace(CASE, sabotage="drop gradients of standing copies")))
