"""Copies of another framework's experts, on CPUs; `tests/gpu` has the paths between GPUs."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.gpu.other_experts import copies_of_others


@pytest.mark.parametrize(("path", "per_node"), [("collective", 2), ("host", 4), ("auto", 1)])
def test_homes_get_every_gradient_once(path, per_node):
    for found in run_ranks(4, copies_of_others, path, per_node, False):
        assert found["standing"] + found["flash"] > 0
        assert found["wrong weights"] == found["missed gradients"] == 0
