"""Megatron's experts through the engines on a GPU: copies have the right weights, homes get every gradient once."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.gpu.other_experts import copies_of_others


@pytest.mark.parametrize("path", ["ipc", "host", "both", "collective", "auto"])
def test_copies_of_parameters_in_a_buffer(path):
    for found in run_ranks(4, copies_of_others, path, 2, True, backend="nccl", timeout_s=200):
        assert found["standing"] > 0
        assert found["flash"] > 0
        assert found["wrong weights"] == found["missed gradients"] == 0
