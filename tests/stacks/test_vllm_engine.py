"""The real vLLM as rollout engine: new weights reach every tensor of the live model, in process and over HTTP."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.stacks import vllm_runs

from equilibra.integrations.served import write_weights
from equilibra.integrations.vllm.engine import EXTENSION

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-5
"""largest difference of a log-probability in float32; stale experts show as 0.01 and more"""
MEAN_ROUNDING = 2e-6

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-stacks` has it"
)


def environment(**others):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **others}


def scenario(name, folder):
    """What a run of `vllm_runs` says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stacks.vllm_runs", name, str(folder)], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(folder, *options):
    """Metrics of the steps of a short run on two ranks."""
    command = [
        sys.executable, "-m", "equilibra", "train", "--plain", "--output", str(folder), "rollout.engine=vllm",
        "cluster.nodes=1", "cluster.ranks_per_node=2", "run.evaluate_every=0", "run.checkpoint_every=0",
        "warm_up.steps=20", *options,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder.parent, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# --- in process ---


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    return scenario("in_process", tmp_path_factory.mktemp("updates"))


def test_updates_reach_every_tensor_of_the_live_model(updates):
    """All weights are drawn anew twenty times; one more start compares the first update with a fresh model."""
    said = updates["ours"]
    assert len(said["updates"]) == 20
    assert (said["in_place"], said["starts"]) == (True, 2)
    assert max(one["distance"] for one in said["updates"]) < ROUNDING


def test_an_update_that_does_not_arrive_is_noticed_and_vllm_started_anew(updates):
    """The control: vLLM's own reload leaves packed experts and the head as they were."""
    said = updates["compared"]
    assert (said["in_place"], said["starts"]) == (False, 3)
    assert max(one["distance"] for one in said["updates"]) < ROUNDING


def test_without_the_comparison_it_would_not_be_noticed(updates):
    assert [one["distance"] > 0.1 for one in updates["believed"]["updates"]] == [False, True, True]


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """A run of twenty steps, and its folder; `start` has the weights before them."""
    folder = tmp_path_factory.mktemp("twenty")
    (folder / "start").mkdir()
    return train(folder / "run", "run.steps=20", f"warm_up.cache={folder / 'start'}"), folder


def test_a_run_of_twenty_steps(twenty):
    """Experts change unless no answer token reached them."""
    steps, folder = twenty
    assert len(steps) == 20
    assert max(step["mismatch_mean"] for step in steps) < MEAN_ROUNDING
    assert all(step["tokens_without_routing"] == 0 for step in steps)
    (start,) = (folder / "start").iterdir()
    before, after = tensors(start), tensors(folder / "run" / "engine-weights")
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 4 * 16 * 3
    assert sum(torch.equal(before[name], after[name]) for name in experts) < len(experts) // 10
    printed = "".join(file.read_text() for file in (folder / "run" / "output").iterdir())
    assert "starts it anew" not in printed


# --- over HTTP ---


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def vllm_server(model, log, *options):
    """The address of a running server."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "80",
        "--kv-cache-memory-bytes", str(1 << 28), "--tokens-only", "--enable-return-routed-experts",
        "--logprobs-mode", "processed_logprobs", *options,
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(VLLM_SERVER_DEV_MODE="1"), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 240
        while not _answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _answers(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


def test_a_server_takes_weights_and_answers_for_several_ranks(twenty, tmp_path):
    """The same rewards as in process: answers are the same, only who computes them is another."""
    folder = vllm_runs.model_folder()
    weights = vllm_runs.random_weights(vllm_runs.reference(folder), 7)
    write_weights(tmp_path / "model", iter(weights.items()), {"config.json": folder.config_file(torch.float32)})
    with vllm_server(tmp_path / "model", tmp_path / "log", "--worker-extension-cls", EXTENSION) as address:
        (tmp_path / "address").write_text(address)
        said = scenario("served", tmp_path)
        steps = train(tmp_path / "run", "run.steps=4", f"rollout.server={address}")
    assert max(one["distance"] for one in said["updates"]) < ROUNDING
    assert said["after_another"] == -1
    assert max(step["mismatch_mean"] for step in steps) < MEAN_ROUNDING
    assert [step["reward"] for step in steps] == [step["reward"] for step in twenty[0][:4]]
