"""Slow rollouts and hand-overs: ranks wait for them longer than for each other inside a step, and notice lost ranks."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from tests.distributed.ranks import collect, run_ranks, start_ranks
from tests.distributed.rl_runs import run, small
from tests.references.hf_models import small_config

from equilibra.integrations.hf import Replica
from equilibra.train import build
from equilibra.train.config import ClusterConfig

TWO = ClusterConfig(nodes=1, ranks_per_node=2)
STEP_S, SLOW_S = 7.0, 9.0
"""timeout inside a step; what the slow rank takes"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = small_config("qwen3_moe")
    config.initializer_range = 0.08
    config.save_pretrained(folder)
    return folder


def settings(model, **changes):
    return small(
        model, cluster=TWO, run__steps=1, run__evaluate_problems=2, run__timeout_s=STEP_S, warm_up__steps=1, **changes
    )


def slow(config, folder, seconds):
    """Rank 1 is slow with its rollout and with its weights; negative: it dies in the rollout."""

    class Slow(Replica):
        def generate(self, requests, *, temperature):
            if dist.get_rank() == 1 and len(requests) > 2:  # no evaluation
                if seconds < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(seconds)
            return super().generate(requests, temperature=temperature)

        def load_weights(self, weights, *, version):
            def slowly():
                for number, one in enumerate(weights):
                    if dist.get_rank() == 1 and version and number == 0:
                        time.sleep(seconds)
                    yield one

            super().load_weights(slowly(), version=version)

    build.Replica = Slow
    return run(config, folder)


def test_a_slow_rollout_and_a_slow_hand_over_are_waited_for(model, tmp_path):
    (notes, _) = run_ranks(2, slow, settings(model), tmp_path, SLOW_S, timeout_s=240)
    assert [note["step"] for note in notes.steps] == [0]


def test_a_rank_that_is_silent_for_longer_than_the_rollout_may_take_is_lost(model, tmp_path):
    processes, pipes, _ = start_ranks(2, slow, settings(model, rollout__timeout_s=3.0), tmp_path, SLOW_S)
    first, _ = collect(processes, pipes, 200)
    assert "RankLostError: waiting for the rollouts of all ranks did not finish" in first.error


def test_a_dead_rank_is_noticed_at_once(model, tmp_path):
    """However long rollouts may take."""
    start = time.monotonic()
    processes, pipes, _ = start_ranks(2, slow, settings(model, rollout__timeout_s=600.0), tmp_path, -1.0)
    first, second = collect(processes, pipes, 200)
    assert second.died == -9
    assert "RankLostError: waiting for the rollouts of all ranks did not finish" in first.error
    assert time.monotonic() - start < 200
