"""RL runs: planner, ranks and interruptions change no number of them."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.rl_runs import ALONE, largest_gap, run, small
from tests.references.hf_models import small_config

ALGORITHMS = ["grpo", "gspo", "ppo", "tppo"]
ROUNDING = 1e-6
"""absolute where numbers are below 1; transformers computes norms and routers in float32 inside a float64 model"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = small_config("qwen3_moe")
    config.initializer_range = 0.08
    config.save_pretrained(folder)
    return folder


def trained(config, folder, **options):
    folder.mkdir(exist_ok=True)
    processes = config.cluster.num_processes
    return run_ranks(processes, run, config, folder, *options.values(), timeout_s=240)[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planner_and_ranks_change_no_number(algorithm, model, tmp_path):
    balanced = trained(small(model, algorithm=algorithm), tmp_path / "balanced")
    static = trained(small(model, algorithm=algorithm, balance__planner="static"), tmp_path / "static")
    alone = trained(small(model, algorithm=algorithm, cluster=ALONE), tmp_path / "alone")
    print(largest_gap(balanced, static), largest_gap(balanced, alone))
    for other in (static, alone):
        assert [note["reward"] for note in other.steps] == [note["reward"] for note in balanced.steps]
        assert largest_gap(balanced, other) < ROUNDING
    assert all(note["mismatch_max"] < 1e-4 for note in balanced.steps)
    assert all(note["tokens_without_routing"] == 0 for note in balanced.steps)
    assert min(note["gradient_norm"] for note in balanced.steps) > 1e-3  # rewards differ, something is learned
    assert balanced.steps[-1]["imbalance"] < balanced.steps[-1]["imbalance_static"]
