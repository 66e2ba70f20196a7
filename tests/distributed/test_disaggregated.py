"""The disaggregated engine answers what the embedded one answers, or says why it cannot."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.disaggregated import Small, same
from tests.distributed.ranks import run_ranks
from tests.distributed.rl_runs import NODES, run, small
from tests.references.hf_models import CONFIGS, small_config

from equilibra.core.errors import BudgetError, ExecuteError, InputError
from equilibra.integrations.hf import open_model_folder
from equilibra.integrations.hf.disaggregated import pool_model
from equilibra.rl.engine import Request
from equilibra.rollout.control import Ask
from equilibra.rollout.instances import Instances
from equilibra.rollout.pool import PoolOfRanks
from equilibra.train.config import RolloutConfig

pytestmark = pytest.mark.arithmetic

FLOAT64 = 1e-6
"""routers and attention compute their softmax in float32"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Small("qwen3_moe", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def pool(model):
    with model.pool(attention=2, experts=3, micro_batches=2, places=5, prefill_tokens=8, spare_slots=2) as made:
        yield made


def test_answers_are_those_of_the_embedded_engine(model, pool):
    found = pool.generate(model.requests, temperature=1.0)
    assert same(found, model.answers, tolerance=FLOAT64)
    assert any(answer.ended for answer in found) or max(answer.tokens.size for answer in found) > 8
    other = [replace(one, noise=1 - one.noise) for one in model.requests]
    assert not same(pool.generate(other, temperature=1.0), model.answers, tolerance=FLOAT64), "control: other noise"
    greedy = model.embedded.generate(model.requests, temperature=0.0)
    assert same(pool.generate(model.requests, temperature=0.0), greedy, tolerance=FLOAT64)


def test_copies_level_the_expert_processes_and_change_no_answer(model, pool):
    pool.generate(model.requests, temperature=1.0)
    pool.rebalance()
    assert any(len(set(i)) > 1 for i in pool.instances.process_LEI.reshape(-1, pool.instances.process_LEI.shape[2]))
    assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64)
    after = pool.statistics()
    assert after.imbalance < 1.1 < after.imbalance_without_copies
    pool.load_weights(model.weights(), version=4)  # copies come with the stream too
    assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64)


def test_new_weights_and_their_version_reach_every_process(model, pool):
    def doubled():
        return ((name, value * 2 if "down_proj" in name else value) for name, value in model.weights())

    pool.load_weights(doubled(), version=5)
    model.embedded.load_weights(doubled(), version=5)
    wanted = model.embedded.generate(model.requests, temperature=1.0)
    assert same(pool.generate(model.requests, temperature=1.0), wanted, tolerance=FLOAT64)
    assert not same(wanted, [replace(one, version=5) for one in model.answers], tolerance=FLOAT64)
    pool.load_weights(model.weights(), version=4)
    model.embedded.load_weights(model.weights(), version=4)


def test_wrong_weights_are_refused_and_right_ones_still_load(model, pool):
    every = list(model.weights())
    with pytest.raises(InputError, match=r"1 weights are missing, among them model\.layers\.2\.mlp\.experts\.7"):
        pool.load_weights([one for one in every if not one[0].endswith("layers.2.mlp.experts.7.up_proj.weight")])
    with pytest.raises(InputError, match="weight strange came, but the engine has no such weight"):
        pool.load_weights([*every, ("strange", torch.zeros(2))])
    with pytest.raises(InputError, match=r"came with shape \[1, 32\], but the engine has \[300, 32\]"):
        pool.load_weights([(name, value[:1] if "embed" in name else value) for name, value in every])
    with pytest.raises(InputError, match="no whole set of weights"):
        pool.generate(model.requests, temperature=1.0)
    pool.load_weights(every, version=4)
    assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64)


def test_weights_that_stop_coming_leave_no_mixture(model, pool):
    def broken():
        yield from list(model.weights())[:20]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        pool.load_weights(broken(), version=5)
    with pytest.raises(InputError, match="no whole set of weights"):
        pool.generate(model.requests, temperature=1.0)
    pool.load_weights(model.weights(), version=4)
    assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64)


def test_weights_in_transit_are_let_go(model, pool):
    pool.load_weights(model.weights(), version=4)
    pool.generate(model.requests, temperature=1.0)
    pool.rebalance()
    for worker in pool._workers.every:
        mapped = {
            line.split()[4] for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines() if "/dev/shm" in line
        }
        assert len(mapped) == 1, "more than the buffers of M2N"


def test_an_interrupted_call_leaves_no_answers_for_the_next(model, monkeypatch):
    with model.pool(experts=2) as pool:
        pump, calls = pool._pump, []

        def interrupted(timeout_s):
            calls.append(0)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return pump(timeout_s)

        monkeypatch.setattr(pool, "_pump", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.generate(model.requests, temperature=1.0)
        with pytest.raises(ExecuteError, match="a call of generate ended with KeyboardInterrupt; start a new one"):
            pool.generate(model.requests[:2], temperature=1.0)


def test_a_process_that_does_not_read_hangs_nobody(model):
    with model.pool(experts=2, timeout_s=2.0) as pool:
        os.kill(pool._attention[0].pid, signal.SIGSTOP)
        random = np.random.default_rng(0)
        many = [Request(tokens=random.integers(2, 300, 9000), noise=random.random(4000)) for _ in range(12)]
        with pytest.raises(ExecuteError, match="no process has made progress for 2 s"):
            pool.generate(many, temperature=1.0)


def test_requests_at_the_edges(model, pool):
    assert pool.generate([], temperature=1.0) == []
    prompt = model.requests[0].tokens
    (empty,) = pool.generate([Request(tokens=prompt, noise=np.zeros(0))], temperature=1.0)
    assert (empty.tokens.size, empty.experts.shape, empty.version) == (0, (prompt.size - 1, 2, 3), 4)
    with pytest.raises(BudgetError, match=r"request 1 needs 16399 tokens .* has 16384: raise kv_tokens"):
        pool.generate([model.requests[0], Request(tokens=prompt[:2], noise=np.zeros(16_398))], temperature=1.0)
    with pytest.raises(InputError, match="request 0 has no tokens"):
        pool.generate([Request(tokens=prompt[:0], noise=np.zeros(3))], temperature=1.0)
    with pytest.raises(InputError, match="request 0 has tokens -1 to 300, but the model knows 0 to 299"):
        pool.generate([Request(tokens=np.array([-1, 300]), noise=np.zeros(3))], temperature=1.0)
    with pytest.raises(InputError, match="temperature = -1: it must be at least 0"):
        pool.generate(model.requests[:1], temperature=-1.0)
    one = pool.generate(model.requests[:1], temperature=1.0)
    assert same(one, model.answers[:1], tolerance=FLOAT64)


def test_rotary_embeddings_that_depend_on_the_batch_are_refused(tmp_path):
    config = small_config("qwen3_moe")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="answers would depend on the longest one beside them"):
        pool_model(open_model_folder(tmp_path), dtype=torch.float64, device=torch.device("cpu"), end=1)


def test_tokens_sent_to_wrong_processes_are_an_error(model):
    """Control: instances that are not where the table says."""
    with model.pool(experts=2) as pool:
        table = pool.instances
        moved = Instances(process_LEI=1 - table.process_LEI, until_LEI=table.until_LEI, num_processes=2)
        for worker in pool._attention:
            pool._tell(worker, Ask.INSTANCES, moved)
        with pytest.raises(ExecuteError, match=r"expert process \d failed with InputError"):
            pool.generate(model.requests, temperature=1.0)
        with pytest.raises(ExecuteError, match="cannot be used any more"):
            pool.generate(model.requests, temperature=1.0)


LOST = {
    ("expert", signal.SIGKILL): "expert process 1 was killed by SIGKILL",
    ("expert", signal.SIGSTOP): r"no process has made progress for 4 s; .* expert process 1 \(rows not answered\)",
    ("attention", signal.SIGSTOP): r"no process .* for 4 s; waiting for attention process 0 \(\d answers open\);",
}


@pytest.mark.parametrize(("who", "number"), [
    ("expert", signal.SIGKILL),
    *(pytest.param(who, signal.SIGSTOP, marks=pytest.mark.slow) for who in ("expert", "attention")),
])  # fmt: skip
def test_a_lost_process_is_an_error_in_time(model, who, number):
    random = np.random.default_rng(0)
    endless = [Request(tokens=random.integers(2, 300, 9), noise=random.random(4000)) for _ in range(8)]
    with model.pool(experts=2, timeout_s=4.0) as pool:
        pids = [worker.pid for worker in pool._workers.every]
        victim = pool._experts[1].pid if who == "expert" else pool._attention[0].pid
        threading.Timer(0.5, os.kill, (victim, number)).start()
        start = time.monotonic()
        with pytest.raises(ExecuteError, match=LOST[who, number]):
            pool.generate(endless, temperature=1.0)
        assert time.monotonic() - start < 20
    end = time.monotonic() + 10
    while time.monotonic() < end and any(map(_alive, pids)):
        time.sleep(0.05)
    assert not any(map(_alive, pids)), "a process stays behind"


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_with(config, folder, kill_in_step=None, resume=False):
    """Called on every rank: a run; optionally an expert process is killed in a step's rollout."""
    generate = PoolOfRanks.generate
    calls = []

    def killing(self, requests, *, temperature):
        calls.append(0)
        if len(calls) == kill_in_step and self.pool is not None:
            os.kill(self.pool._experts[0].pid, signal.SIGKILL)
        return generate(self, requests, temperature=temperature)

    PoolOfRanks.generate = killing
    try:
        return run(config, folder, resume), ""
    except ExecuteError as error:
        return None, str(error)
    finally:
        PoolOfRanks.generate = generate


COMPARED = ("reward", "policy", "gradient_norm", "tokens", "answer_tokens")


@pytest.fixture
def configs(tmp_path):
    """A short run with the embedded engine, and the same with the disaggregated one."""
    config_of_model = small_config("qwen3_moe")
    config_of_model.initializer_range = 0.08
    config_of_model.save_pretrained(tmp_path / "model")
    config = small(tmp_path / "model", cluster=replace(NODES, ranks_per_node=1), run__steps=2, run__timeout_s=30.0)
    options = {"experts": 2, "micro_batches": 2, "places": 8}
    rollout = RolloutConfig(**{**vars(config.rollout), "engine": "disaggregated", "options": options})
    for name in ("embedded", "apart"):
        (tmp_path / name).mkdir()
    return config, replace(config, rollout=rollout)


def compared(notes):
    return [[note[name] for name in COMPARED] for note in notes.steps]


def test_training_learns_the_same(configs, tmp_path):
    ((wanted, _), _) = run_ranks(2, run_with, configs[0], tmp_path / "embedded", timeout_s=240)
    ((found, _), _) = run_ranks(2, run_with, configs[1], tmp_path / "apart", timeout_s=240)
    assert compared(found) == compared(wanted)
    assert found.held_out == wanted.held_out


@pytest.mark.slow
def test_training_survives_a_killed_process(configs, tmp_path):
    ((wanted, _), _) = run_ranks(2, run_with, configs[0], tmp_path / "embedded", timeout_s=240)
    outcomes = run_ranks(2, run_with, configs[1], tmp_path / "apart", 4, timeout_s=240)
    assert all("expert process 0" in said and "SIGKILL" in said for _, said in outcomes), outcomes
    ((rest, _), _) = run_ranks(2, run_with, configs[1], tmp_path / "apart", None, True, timeout_s=240)
    assert [note["step"] for note in rest.steps] == [1]
    assert compared(rest) == compared(wanted)[1:]


@pytest.mark.slow
def test_gloo_carries_the_same_rows(model):
    with model.pool(attention=2, experts=2, spare_slots=1, transport="gloo") as pool:
        assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_on_every_shape(family, tmp_path):
    model = Small(family, tmp_path / "model")
    for attention, experts, micro_batches, kv_tokens in (
        (1, 1, 1, 4096), (1, 2, 3, 64), (2, 1, 2, 48), (3, 4, 2, 64), (4, 4, 4, 4096), (4, 3, 1, 48)
    ):  # fmt: skip
        setting = {"attention": attention, "experts": experts, "micro_batches": micro_batches, "kv_tokens": kv_tokens}
        with model.pool(**setting, places=4, page=4, prefill_tokens=7, spare_slots=1) as pool:
            for _ in range(2):
                assert same(pool.generate(model.requests, temperature=1.0), model.answers, tolerance=FLOAT64), setting
                pool.rebalance()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_narrow_types_agree_to_rounding(dtype, tolerance, tmp_path):
    """Log-probabilities of the first token, before rounding can change what follows."""
    model = Small("qwen3_moe", tmp_path / "model", dtype=dtype)
    with model.pool(attention=2, experts=2, spare_slots=1) as pool:
        found = pool.generate(model.requests, temperature=1.0)
    firsts = [
        (one.logprobs[0], other.logprobs[0])
        for one, other in zip(found, model.answers, strict=True) if one.tokens[0] == other.tokens[0]
    ]  # fmt: skip
    assert len(firsts) > 0.7 * len(found)
    assert max(abs(one - other) for one, other in firsts) < tolerance
