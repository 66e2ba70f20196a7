"""The script in examples/verl is one that verl accepts."""

import subprocess

import pytest
from tests.stacks.trainer import REPOSITORY, environment

SCRIPT = REPOSITORY / "examples" / "verl" / "run_qwen3_30b_a3b_r3.sh"


@pytest.mark.parametrize("more", [[], ["actor_rollout_ref.actor.megatron.no_such_option=1"]])
def test_verl_takes_every_option_of_the_script(more: list[str]) -> None:
    """verl's configuration refuses unknown keys: the second case is the control."""
    variables = environment() | {
        "MODEL": "model", "TRAIN": "train.parquet", "TEST": "test.parquet",
        "VERL_USE_EXTERNAL_MODULES": "tests.stacks.cpu",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", SCRIPT, *more, "--cfg", "job"], env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode == 0) == (not more), done.stderr
    assert ("equilibra:\n          spare_slots: 2" in done.stdout) == (not more)
