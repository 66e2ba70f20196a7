"""BalancedMoE in bf16 through the grouped kernels: what a plan does changes nothing, and the host waits for nothing."""

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.test_training import WORLDS
from tests.gpu.bf16 import bf16_steps

from equilibra.events.schema import Direction, Kind

CLUSTER, RANKS = WORLDS["4 ranks"]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biases"])
def without_balancing(request):
    return request.param, run_ranks(RANKS, bf16_steps, CLUSTER, "collective", "static", request.param, timeout_s=200)


@pytest.mark.parametrize("path", ["ipc", "host", "both", "collective", "auto"])
def test_copies_and_moves_change_nothing(path, without_balancing):
    bias, wanted = without_balancing
    found = run_ranks(RANKS, bf16_steps, CLUSTER, path, "random", bias, timeout_s=200)
    assert found[0]["copies"] > 0
    assert found[0]["moves"] > 0
    for step in range(2):
        first, second = found[0]["losses"][step], wanted[0]["losses"][step]
        assert first == pytest.approx(second, rel=1e-5 if step == 0 else 1e-2)
    all_found = {key: value for rank in found for key, value in rank["gradients"][0].items()}
    all_wanted = {key: value for rank in wanted for key, value in rank["gradients"][0].items()}
    assert all_found.keys() == all_wanted.keys()
    scale = max(float(np.abs(value).max()) for value in all_wanted.values())
    for key, value in all_wanted.items():  # products of bf16 rows are summed in float32, in another order
        assert np.allclose(all_found[key], value, rtol=1e-3, atol=1e-5 * scale), key


def test_events_have_the_times_of_the_device():
    found = run_ranks(RANKS, bf16_steps, CLUSTER, "ipc", "random", False, timeout_s=200)
    for rows, took_us in (part for rank in found for part in rank["events"]):
        kinds = Kind.EXPERTS, Kind.FLASH_COPY, Kind.FLASH_GRADIENT
        experts, copies, gradients = (rows[rows["kind"] == kind] for kind in kinds)
        assert (experts["end_us"] > experts["start_us"]).all()
        assert rows["end_us"].max() <= took_us
        forward = experts[(experts["direction"] == Direction.FORWARD) & (experts["micro_batch"] == 0)]
        assert (np.diff(forward["start_us"][np.argsort(forward["layer"])]) > 0).all()
        assert (copies["end_us"] > copies["start_us"]).all()
        assert (gradients["end_us"] >= gradients["start_us"]).all()
    assert any((part[0]["kind"] == Kind.FLASH_COPY).any() for rank in found for part in rank["events"])


@pytest.mark.parametrize("path", ["ipc", "host", "both"])
def test_the_host_never_waits_for_the_device(path):
    found = run_ranks(RANKS, bf16_steps, CLUSTER, path, "random", False, True, timeout_s=200)
    assert found[0]["copies"] > 0
