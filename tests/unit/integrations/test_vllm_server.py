"""Servers of vLLM as rollout engine, over a stand-in of their format: numbers, versions, and errors that say why."""

import numpy as np
import pytest
import torch
from tests.distributed.rl_runs import ALONE, largest_gap, run, small
from tests.references.sglang_server import Seeded, run_embedded, serving
from tests.references.vllm_server import ServedVLLM

from equilibra.core.errors import InputError, MismatchError
from equilibra.core.placement import Cluster
from equilibra.execute.group import join_expert_group
from equilibra.integrations.routing_formats import model_from_config
from equilibra.integrations.served import Server
from equilibra.integrations.vllm.engine import VLLMServerEngine
from equilibra.rl.engine import UNKNOWN, Request
from equilibra.train.build import check_engine, model_folder_of
from equilibra.train.config import TrainConfig
from equilibra.train.config_files import with_overrides

END = 17
CPU = torch.device("cpu")

pytestmark = pytest.mark.arithmetic


def engine_of(model, tmp_path, *urls):
    return VLLMServerEngine(
        servers=[Server(url=url, timeout_s=30.0) for url in urls], end=END, vocabulary=300,
        group=join_expert_group(Cluster(num_nodes=1, ranks_per_node=1), timeout_s=10),
        model=model_from_config(model.config.to_dict()), folder=tmp_path / "weights",
        files={"config.json": model.config_file(torch.float64)},
    )  # fmt: skip


def requests_of(number=4):
    random = np.random.default_rng(1)
    return [
        Request(tokens=random.integers(0, 300, 3 + n % 3), noise=random.random(6 if n else 1)) for n in range(number)
    ]


def embedded(model, weights):
    reference = Seeded(model, dtype=torch.float64, device=CPU, end=END, pad=0)
    reference.load_weights(weights.items())
    return [reference.generate([request], temperature=1.0)[0] for request in requests_of()]


def test_servers_give_the_numbers_of_the_embedded_engine(model, weights, tmp_path):
    served = ServedVLLM()
    with serving(served) as url:
        engine = engine_of(model, tmp_path, url)
        for version, scale in enumerate((1.0, 1.01)):
            current = {name: value * scale for name, value in weights.items()}
            engine.load_weights(iter(current.items()), version=version)
            found = engine.generate(requests_of(), temperature=1.0)
            for one, other in zip(found, embedded(model, current), strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-9)
                np.testing.assert_array_equal(one.experts, other.experts)
                assert (one.ended, one.version) == (other.ended, version)
    assert served.asked == 8


def test_a_restarted_server_answers_with_an_unknown_version(model, weights, tmp_path):
    served = ServedVLLM()
    with serving(served) as url:
        engine = engine_of(model, tmp_path, url)
        engine.load_weights(iter(weights.items()), version=3)
        served.version = "default"
        assert {one.version for one in engine.generate(requests_of(), temperature=1.0)} == {UNKNOWN}


@pytest.mark.parametrize(("change", "reason"), [
    ({"number": "0.32.0"}, r"vLLM 0\.32\.0 is not supported: since 0\.31"),
    ({"closed": {"/collective_rpc"}}, r"404 .*: start it with VLLM_SERVER_DEV_MODE=1 .*--worker-extension-cls"),
    ({"call": lambda body: 1 / 0}, r"ZeroDivisionError.*: start it with VLLM_SERVER_DEV_MODE=1"),
    ({"closed": {"/version"}}, r"/version refused: 404"),
])  # fmt: skip
def test_servers_that_cannot_take_weights(change, reason, model, weights, tmp_path):
    served = ServedVLLM()
    vars(served).update(change)
    with serving(served) as url, pytest.raises(InputError, match=reason):
        engine_of(model, tmp_path, url).load_weights(iter(weights.items()))


def choice(change):
    def spoil(responses):
        change(responses[0]["choices"][0])
        return responses

    return spoil


@pytest.mark.parametrize(("spoil", "reason"), [
    (lambda responses: [{"choices": []}], "must have one choice"),
    (lambda responses: [7], "must have one choice, not 7"),
    (choice(lambda one: one.pop("logprobs")), "token_ids and as many logprobs"),
    (choice(lambda one: one["token_ids"].append(5)), "token_ids and as many logprobs"),
    (choice(lambda one: one.update(token_ids=[300] * len(one["token_ids"]))), "from 0 to 299, not 300"),
    (choice(lambda one: one["logprobs"]["content"][0].update(logprob=None)), "finite numbers, not None"),
    (choice(lambda one: one["logprobs"]["content"].__setitem__(0, 3)), "finite numbers, not None"),
    (choice(lambda one: one.update(logprobs=[1])), "logprobs must be a table"),
    (choice(lambda one: one.update(routed_experts=None)), "no token has routing"),
    (choice(lambda one: one.update(routed_experts="AAA")), "not valid base64"),
])  # fmt: skip
def test_answers_that_cannot_be_used(spoil, reason, model, weights, tmp_path):
    served = ServedVLLM()
    with serving(served) as url:
        engine = engine_of(model, tmp_path, url)
        engine.load_weights(iter(weights.items()))
        served.spoil = spoil
        with pytest.raises(InputError, match=reason):
            engine.generate(requests_of(), temperature=1.0)


def test_a_server_without_the_endpoint_is_told_how_to_start(model, weights, tmp_path):
    served = ServedVLLM()
    served.closed = {"/inference/v1/generate"}
    with serving(served) as url:
        engine = engine_of(model, tmp_path, url)
        engine.load_weights(iter(weights.items()))
        with pytest.raises(InputError, match=r"refused: 404 .*: start it with .*--tokens-only"):
            engine.generate(requests_of(), temperature=1.0)


def test_training_with_servers_gives_the_numbers_of_the_embedded_engine(model, tmp_path):
    """In float32, since vLLM has no float64; a server that loses its version stops the run."""
    served, settings = ServedVLLM(), {"cluster": ALONE, "run__steps": 2, "run__dtype": "float32"}
    for name in ("embedded", "served", "restarted"):
        (tmp_path / name).mkdir()
    expected = run_embedded(small(model.path, **settings), tmp_path / "embedded")
    with serving(served) as url:
        config = small(model.path, **settings, rollout__engine="vllm", rollout__server=url)
        found = run(config, tmp_path / "served")
        assert largest_gap(found, expected, plans=True) < 1e-2
        assert max(step["mismatch_mean"] for step in found.steps) < 1e-6
        served.rename = lambda body: {"success": True}
        with pytest.raises(MismatchError, match="weights that this run did not hand over, but was given version 0"):
            run(config, tmp_path / "restarted")


def config_of(*options):
    return with_overrides(TrainConfig(), ["rollout.engine=vllm", *options])


def test_settings_of_servers():
    check_engine(config_of("rollout.server=http://a:1,http://b:2"))
    with pytest.raises(InputError, match=r"rollout\.options are for the .* vLLM on the ranks, .* with rollout\.server"):
        check_engine(config_of("rollout.server=http://a:1", "rollout.options.enforce_eager=true"))
    with pytest.raises(InputError, match="the address of a server must look like"):
        check_engine(config_of("rollout.server=a"))
    with pytest.raises(InputError, match=r"rollout\.server is for sglang and vllm"):
        check_engine(with_overrides(TrainConfig(), ["rollout.server=http://a:1"]))


def test_the_embedded_model_has_heads_that_vllm_has():
    ours, theirs = model_folder_of(TrainConfig()).config, model_folder_of(config_of()).config
    assert (ours.head_dim, theirs.head_dim) == (16, 32)
    assert ours.num_attention_heads * ours.head_dim == theirs.num_attention_heads * theirs.head_dim
    differing = {name for name, value in ours.to_dict().items() if theirs.to_dict()[name] != value} - {"_name_or_path"}
    assert differing == {"head_dim", "num_attention_heads", "num_key_value_heads"}
