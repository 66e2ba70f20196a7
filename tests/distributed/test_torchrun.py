"""`equilibra train` under torchrun: one agent of two ranks, or two of one each, as on two nodes, are one run."""

import json
import os
import socket
import subprocess
import sys

import pytest
from tests.references.hf_models import small_config

OPTIONS = (
    "cluster.nodes=2", "cluster.ranks_per_node=1",
    "run.steps=2", "run.evaluate_problems=4", "run.checkpoint_every=1", "warm_up.steps=2", "warm_up.batch=8",
    "rollout.prompts=4", "rollout.answers=2", "rollout.reward_cut_off=true", "balance.tokens_per_rank=128",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        [line.get(name) for name in ("step", "reward", "loss", "kl", "entropy", "reward_held_out")] for line in lines
    ]


@pytest.mark.parametrize("num_agents", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_agents_are_one_run(num_agents, tmp_path):
    small_config("qwen3_moe").save_pretrained(tmp_path / "model")
    train = ["equilibra", "train", f"model.source={tmp_path / 'model'}", *OPTIONS]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run",
                "--nnodes", str(num_agents), "--nproc-per-node", str(2 // num_agents),
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "-m", *train,
                "--output", str(tmp_path / "torchrun"),
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for port in [free_port()] for _ in range(num_agents)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * num_agents, "\n".join(said)
    assert sum("step   2/2" in text or "step 2/2" in text for text in said) == 1  # one rank of all talks
    subprocess.run(
        [sys.executable, "-m", *train, "--output", str(tmp_path / "here"), "--plain"], check=True, env=environment,
        capture_output=True, timeout=300,
    )  # fmt: skip
    here, there = metrics(tmp_path / "here"), metrics(tmp_path / "torchrun")
    assert len(here) == 4
    assert here == there
    assert any(value for value in here[2][1:5])


@pytest.mark.parametrize("world", [2, 8])
def test_other_ranks_than_the_configuration_has(world, tmp_path):
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "equilibra", "train", "--output", str(tmp_path / "run")], env=environment,
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cluster" in done.stderr
