"""Memory: nothing grows over many steps, weights can leave the GPU between steps, segments may be expandable."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.test_training import WORLDS
from tests.gpu.memory import many_steps, offloaded, one_step

from equilibra.execute.copies.transfer import Path

CLUSTER, RANKS = WORLDS["4 ranks"]
SECONDS = 25.0


@pytest.mark.parametrize("path", [Path.BOTH, Path.COLLECTIVE])
def test_nothing_grows_over_many_steps(path):
    found = run_ranks(RANKS, many_steps, CLUSTER, path, SECONDS, timeout_s=SECONDS + 200, backend="nccl")
    for steps, early, late in found:
        print(path, steps, early, late)
        assert steps >= 100
        for name, most in {"allocated": 2**20, "reserved": 2**21, "host": 2**26, "files": 2, "maps": 40, "threads": 0,
                           "system_threads": 2}.items():  # fmt: skip
            assert late[name] <= early[name] + most, (name, steps, early, late)


@pytest.mark.parametrize("path", [Path.IPC, Path.BOTH, Path.HOST, Path.COLLECTIVE])
def test_weights_can_leave_the_gpu_between_steps(path):
    for wanted, losses, held in run_ranks(RANKS, offloaded, CLUSTER, path, timeout_s=200, backend="nccl"):
        assert losses == pytest.approx(wanted, rel=1e-4)
        for num_bytes, before, after in held:
            assert before - after >= 0.9 * num_bytes, (num_bytes, before, after)


def test_expandable_segments():
    wanted = run_ranks(RANKS, one_step, CLUSTER, Path.COLLECTIVE, False, timeout_s=200, backend="nccl")
    found = run_ranks(RANKS, one_step, CLUSTER, Path.AUTO, True, timeout_s=200, backend="nccl")
    print("auto took", {path for _, path in found})
    for (loss, _), (same, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(same, rel=1e-4)
