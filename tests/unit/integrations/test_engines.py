"""Rollout engines outside the package: the same numbers as the embedded one, and errors that say what is wrong."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.rl_runs import ALONE, largest_gap, run, small
from tests.references.sglang_server import Seeded, Served, noise_of, run_embedded, sglang_server
from transformers import AutoModelForCausalLM

from equilibra.core.errors import ExecuteError, InputError, MismatchError
from equilibra.core.placement import Cluster
from equilibra.execute.group import join_expert_group
from equilibra.integrations.hf import Replica
from equilibra.integrations.routing_formats import model_from_config
from equilibra.integrations.served import Server, check_url, write_weights
from equilibra.integrations.sglang.engine import SGLangEngine
from equilibra.integrations.vllm.engine import EXTENSION, VLLMEngine, check_version, import_vllm
from equilibra.rl.engine import Request, seed_of
from equilibra.rl.mismatch import mismatch_limit, unit_roundoff
from equilibra.train.config import ClusterConfig, TrainConfig
from equilibra.train.config_files import check_resumable, with_absolute_paths, with_overrides

END = 17
ROUNDING = 1e-9
"""float64: a server's batches, threads and ranks are others, so products have other shapes and sums another order"""
AFTER_ADAM = 1e-6
"""Adam divides by small gradients and magnifies their rounding"""
CPU = torch.device("cpu")

pytestmark = pytest.mark.arithmetic


@pytest.fixture
def group():
    return join_expert_group(Cluster(num_nodes=1, ranks_per_node=1), timeout_s=10)


def requests_of(number=5):
    random = np.random.default_rng(1)
    return [
        Request(tokens=random.integers(0, 300, 3 + n % 3), noise=random.random(6 if n else 1)) for n in range(number)
    ]


def embedded(model, weights, requests, temperature):
    reference = Seeded(model, dtype=torch.float64, device=CPU, end=END, pad=0)
    reference.load_weights(weights.items())
    return reference.generate(requests, temperature=temperature)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=ROUNDING)
        np.testing.assert_array_equal(one.experts, other.experts)
        assert (one.ended, one.experts.dtype) == (other.ended, np.int32)


def sglang_engine(model, group, url, tmp_path, *, timeout_s=10.0, **changes):
    settings = {
        "servers": [Server(url=url, timeout_s=timeout_s)], "group": group, "end": END, "vocabulary": 300,
        "model": model_from_config(model.config.to_dict()), "folder": tmp_path / "new" / "weights",
        "files": {"config.json": model.config_file(torch.float64)}, **changes,
    }  # fmt: skip
    return SGLangEngine(**settings)


# --- SGLang over HTTP ---


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_sglang_gives_the_numbers_of_the_embedded_engine(temperature, model, weights, group, tmp_path):
    requests = requests_of()
    expected = embedded(model, weights, requests, temperature)
    assert (expected[0].experts >= 0).all()
    with sglang_server() as (url, served):
        engine = sglang_engine(model, group, url, tmp_path)
        engine.load_weights(iter(weights.items()))
        same(engine.generate(requests, temperature=temperature), expected)
        nothing = Request(tokens=np.array([1, 2, 3]), noise=np.zeros(0))
        (one,) = engine.generate([nothing], temperature=1.0)
        assert (one.tokens.size, one.experts.shape) == (0, (2, 2, 3))
    assert served.asked == len(requests)


def test_batches_are_asked_one_after_another(model, weights, group, tmp_path):
    requests = requests_of()
    with sglang_server() as (url, _):
        engine = sglang_engine(model, group, url, tmp_path, batch=2)
        engine.load_weights(iter(weights.items()))
        found = engine.generate(requests, temperature=1.0)
    expected = [one for n in range(0, 5, 2) for one in embedded(model, weights, requests[n : n + 2], 1.0)]
    same(found, expected)


def test_pieces_are_bounded_by_the_bytes_of_their_answers(model, weights, group, tmp_path):
    """Not all routing in one answer: 256 long answers of a large model would be gigabytes."""
    requests = requests_of(9)
    with sglang_server() as (url, served):
        engine = sglang_engine(model, group, url, tmp_path, connections=3)
        room = 3 * max(engine._max_bytes(request) for request in requests)
        engine = replace(engine, piece_bytes=room)
        engine.load_weights(iter(weights.items()))
        found = engine.generate(requests, temperature=0.0)
    assert served.asked == 9
    assert max(served.posts) <= 3
    assert max(served.answer_bytes) <= room
    assert len(served.posts) >= 3
    same(found, [one for piece in engine._pieces(requests) for one in embedded(model, weights, piece, 0.0)])
    huge = replace(engine, piece_bytes=1)
    assert [len(piece) for piece in huge._pieces(requests)] == [1] * 9


def test_new_weights_replace_the_old_ones(model, weights, group, tmp_path):
    changed = {name: value * 1.01 for name, value in weights.items()}
    with sglang_server() as (url, served):
        engine = sglang_engine(model, group, url, tmp_path)
        for current in (weights, changed):
            engine.load_weights(iter(current.items()))
        found = engine.generate(requests_of(), temperature=1.0)
    same(found, embedded(model, changed, requests_of(), 1.0))
    with pytest.raises(AssertionError):
        same(found, embedded(model, weights, requests_of(), 1.0))
    assert served.updates == [str(tmp_path / "new" / "weights")] * 2
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights"]


def spoiled(change):
    def spoil(results):
        change(results[0]["meta_info"])
        return results

    return spoil


@pytest.mark.parametrize(("spoil", "reason"), [
    (lambda results: results[:-1], "must answer 5 requests"),
    (lambda results: {"error": "busy"}, "must answer 5 requests"),
    (lambda results: [7] * 5, "must have a table meta_info"),
    (lambda results: b"<html>", "did not answer valid JSON"),
    (lambda results: b"[" * 100_000, "did not answer valid JSON"),
    (lambda results: b" " * (2 << 20), "answered more than the .* does it serve the model"),
    (lambda results: [one | {"meta_info": one["meta_info"] | {"routed_experts": None}} for one in results],
     "no token has routing: start the engine with enable_return_routed_experts"),
    (spoiled(lambda meta: meta.update(routed_experts="AAA")), "not valid base64"),
    (spoiled(lambda meta: meta.update(routed_experts="AAAA")), "not a whole number of tokens"),
    (spoiled(lambda meta: meta.update(prompt_tokens=2, completion_tokens=2)), "it claims 2 tokens in the prompt"),
    (spoiled(lambda meta: meta.pop("completion_tokens")), "must have prompt_tokens and completion_tokens"),
    (spoiled(lambda meta: meta.pop("output_token_logprobs")), "has no output_token_logprobs"),
    (spoiled(lambda meta: meta.update(output_token_logprobs=[[float("nan"), 3, None]])), "finite numbers, not nan"),
    (spoiled(lambda meta: meta.update(output_token_logprobs=[["x", 3, None]])), "finite numbers, not 'x'"),
    (spoiled(lambda meta: meta.update(output_token_logprobs=[[-1.0, 300, None]])), "from 0 to 299, not 300"),
    (spoiled(lambda meta: meta.update(output_token_logprobs=[])), "0 of 1 tokens and does not end with token 17"),
])  # fmt: skip
def test_answers_that_cannot_be_used(spoil, reason, model, weights, group, tmp_path):
    with sglang_server() as (url, served):
        engine = sglang_engine(model, group, url, tmp_path)
        engine.load_weights(iter(weights.items()))
        served.spoil = spoil
        with pytest.raises(InputError, match=reason):
            engine.generate(requests_of(), temperature=1.0)


def test_an_answer_whose_routing_was_forgotten_is_routed_live(model, weights, group, tmp_path):
    """A preempted request has none; the others of the batch do."""
    with sglang_server() as (url, served):
        engine = sglang_engine(model, group, url, tmp_path)
        engine.load_weights(iter(weights.items()))
        served.spoil = spoiled(lambda meta: meta.update(routed_experts=None))
        found = engine.generate(requests_of(), temperature=1.0)
    assert (found[0].experts == -1).all()
    assert all((one.experts >= 0).all() for one in found[1:])


def test_a_server_that_refuses_weights(model, weights, group, tmp_path):
    served = Served()
    with sglang_server(served) as (url, _):
        engine = sglang_engine(model, group, url, tmp_path)
        served.update = lambda body: {"success": False, "message": "out of memory"}
        with pytest.raises(InputError, match=r"did not load the weights .*out of memory"):
            engine.load_weights(iter(weights.items()))
        engine = sglang_engine(model, group, url, tmp_path, files={"config.json": b"{}"})
        del served.update
        with pytest.raises(InputError, match=r"refused: 400 .* must have a model_type"):
            engine.load_weights(iter(weights.items()))


def test_a_stream_is_read_to_its_end_even_if_it_cannot_be_written(weights, group, model, tmp_path):
    """Other ranks take part in every tensor: leaving early would leave them waiting."""
    (tmp_path / "file").write_text("in the way")
    left = iter(weights.items())
    with sglang_server() as (url, _), pytest.raises(InputError, match=r"cannot write .*File exists"):
        sglang_engine(model, group, url, tmp_path, folder=tmp_path / "file" / "weights").load_weights(left)
    assert next(left, None) is None


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_server_that_never_starts():
    now, pauses, port = [0.0], [], free_port()

    def pause(seconds):
        pauses.append(seconds)
        now[0] += seconds

    server = Server(url=f"http://127.0.0.1:{port}", timeout_s=5.0, clock=lambda: now[0], pause=pause)
    with pytest.raises(ExecuteError, match=rf"no server answered at http://127.0.0.1:{port} within 5 s"):
        server.post("/generate", {}, max_bytes=10)
    assert 8 <= len(pauses) <= 10


def test_a_server_that_is_starting_is_waited_for(model, weights, group, tmp_path):
    port = free_port()
    with ExitStack() as stack:
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 2:
                stack.enter_context(sglang_server(port=port))

        server = Server(url=f"http://127.0.0.1:{port}", timeout_s=5.0, pause=pause)
        engine = sglang_engine(model, group, "", tmp_path, servers=[server])
        engine.load_weights(iter(weights.items()))
        same(engine.generate(requests_of(), temperature=1.0), embedded(model, weights, requests_of(), 1.0))
    assert len(pauses) == 2


def test_a_server_that_says_nothing(model):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = Server(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(ExecuteError, match=r"did not answer within 0\.3 s|cannot be reached: timed out"):
            server.post("/generate", {}, max_bytes=10)


@pytest.mark.parametrize("url", [
    "", "localhost:30000", "file:///etc/passwd", "ftp://a", "http://", "http://a:99999", "http://a?b", "http://u:p@a",
])  # fmt: skip
def test_addresses_that_are_none(url):
    with pytest.raises(InputError, match="the address of a server"):
        check_url(url)


def test_transformers_loads_what_is_handed_over(model, weights, tmp_path):
    files = {"config.json": model.config_file(torch.float64)}
    for _ in range(2):  # the second replaces the first
        write_weights(tmp_path / "weights", iter(weights.items()), files, file_bytes=20_000)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 3
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64)
    ours = Replica(model, dtype=torch.float64, device=CPU, end=END, pad=0)
    ours.load_weights(weights.items())
    expected = ours.model.state_dict()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


# --- training through it ---


def test_training_with_servers_gives_the_numbers_of_the_embedded_engine(model, tmp_path):
    """One process: every reported number but times is the same, up to rounding."""
    config = small(model.path, cluster=ALONE, run__steps=2)
    for name in ("embedded", "served"):
        (tmp_path / name).mkdir()
    expected = run_embedded(config, tmp_path / "embedded")
    with sglang_server() as (url, served):
        config = small(model.path, cluster=ALONE, run__steps=2, rollout__engine="sglang", rollout__server=url + ",")
        found = run(config, tmp_path / "served")
    assert largest_gap(found, expected, plans=True) < AFTER_ADAM
    assert max(step["mismatch_max"] for step in [*found.steps, *expected.steps]) < 1e-6
    assert found.steps[-1]["gradient_norm"] > 1e-3
    assert served.updates == [str(tmp_path / "served" / "engine-weights")] * 3
    assert all(step["tokens_without_routing"] == 0 for step in found.steps)


class Stale(Served):
    """A server that goes wrong from the second hand-over on, in one of several ways."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def update(self, body):
        if not self.updates:
            return super().update(body)
        before = self.version, self.replica
        kept = {name: value.clone() for name, value in self.replica._tensor_of_name.items()}
        said = super().update(body)
        if self.fault == "keeps its weights":
            self.replica = before[1]
        if self.fault == "loads all but experts":
            self.replica.load_weights(
                [
                    (name, kept[name] if ".experts." in name else value)
                    for name, value in self.replica._tensor_of_name.items()
                ]
            )
        if self.fault == "says the old version":
            self.version = before[0]
        if self.fault == "was restarted":
            self.version = "default"
        return said


FIGURES = r"step 1: .* tokens differ from the trainer's by [0-9.e-]+ on average .*, rounding explains [0-9.e-]+"


@pytest.mark.parametrize(("fault", "reason"), [
    ("keeps its weights", FIGURES),
    ("loads all but experts", FIGURES),
    ("says the old version", "step 1: .* answered with weights of version 0, but was given version 2"),
    ("was restarted", "step 1: .* weights that this run did not hand over, but was given version 2"),
])  # fmt: skip
def test_an_engine_without_the_trainers_weights_stops_the_run(fault, reason, model, tmp_path):
    """In the first step after the hand-over, before anything is trained on its answers."""
    with sglang_server(Stale(fault)) as (url, served):
        config = small(model.path, cluster=ALONE, rollout__engine="sglang", rollout__server=url, run__evaluate_every=0)
        with pytest.raises(MismatchError, match=reason):
            run(config, tmp_path)
    assert len(served.updates) == 2


def test_a_run_that_was_told_to_goes_on_and_says_so(model, tmp_path):
    with sglang_server(Stale("keeps its weights")) as (url, _):
        config = small(
            model.path, cluster=ALONE, rollout__engine="sglang", rollout__server=url, rollout__mismatch="warn",
            run__evaluate_every=0,
        )  # fmt: skip
        notes = run(config, tmp_path)
    assert [note["step"] for note in notes.steps] == [0, 1, 2]
    warned = [line for line in notes.said if line.startswith("warning: ")]
    assert len(warned) == 2
    assert all("does not have the trainer's weights" in line for line in warned)
    limit = mismatch_limit([unit_roundoff(torch.float64, "cuda")], num_layers=3, temperature=1.0)
    apart = [note["mismatch_mean"] for note in notes.steps]
    assert apart[0] < 1e-3 * limit < limit < min(apart[1:])


def test_ranks_share_servers(model, tmp_path):
    """Two processes, a server each; world rank 0 updates both."""
    two = ClusterConfig(nodes=1, ranks_per_node=2)
    for name in ("embedded", "served"):
        (tmp_path / name).mkdir()
    expected = run_ranks(2, run_embedded, small(model.path, cluster=two, run__steps=1), tmp_path / "embedded")[0]
    with sglang_server() as (first, served), sglang_server() as (second, other):
        config = small(
            model.path, cluster=two, run__steps=1, rollout__engine="sglang", rollout__server=f"{first}, {second}",
            rollout__weights_folder=str(tmp_path / "weights"),
        )  # fmt: skip
        found = run_ranks(2, run, config, tmp_path / "served")[0]
    assert largest_gap(found, expected, plans=True) < AFTER_ADAM
    assert max(step["mismatch_max"] for step in [*found.steps, *expected.steps]) < 1e-6
    assert served.updates == other.updates == [str(tmp_path / "weights")] * 2
    assert served.asked == other.asked > 0


def test_a_resumed_run_may_have_other_servers_but_no_other_engine():
    before = with_overrides(TrainConfig(), ["rollout.engine=sglang", "rollout.server=http://a:1"])
    check_resumable(before, with_overrides(before, ["rollout.server=http://b:1", "rollout.weights_folder=there"]))
    with pytest.raises(InputError, match=r"cannot resume with rollout\.engine"):
        check_resumable(before, with_overrides(before, ["rollout.engine=embedded"]))
    folder = with_absolute_paths(with_overrides(before, ["rollout.weights_folder=there"])).rollout.weights_folder
    assert folder.startswith("/")


# --- vLLM in process, with a stand-in of its documented interface ---


class SamplingParams:
    """The documented arguments, and no others."""

    def __init__(
        self, *, temperature, max_tokens, detokenize, n=1, seed=None, logprobs=None, prompt_logprobs=None,
        stop_token_ids=(-1,), ignore_eos=False,
    ):  # fmt: skip
        assert (n, detokenize) == (1, False)
        assert prompt_logprobs == 0 or (logprobs, ignore_eos) == (0, True)
        self.temperature, self.max_tokens, self.seed, self.stop = temperature, max_tokens, seed, stop_token_ids
        self.of_prompt = prompt_logprobs is not None


class LLM:
    """What is used of vllm.LLM, on top of the server's model."""

    made: ClassVar[list] = []
    keeps: ClassVar[bool] = False
    """whether updates do not reach the model"""

    def __init__(
        self, *, model, dtype, skip_tokenizer_init, enable_return_routed_experts, logprobs_mode, worker_extension_cls,
        max_model_len, **options,
    ):  # fmt: skip
        assert (skip_tokenizer_init, enable_return_routed_experts, max_model_len) == (True, True, 20)
        assert (logprobs_mode, worker_extension_cls) == ("processed_logprobs", EXTENSION)
        self.options, self.dtype, self.calls, self.served = options, dtype, [], Served()
        self.served.update({"model_path": model})
        self.spoil = lambda output: None
        LLM.made.append(self)

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        if not self.keeps:
            self.served.update({"model_path": kwargs["folder"]})

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def generate(self, prompts, sampling_params, use_tqdm):
        assert use_tqdm is False
        if isinstance(sampling_params, SamplingParams):
            return [self._scored(prompt["prompt_token_ids"]) for prompt in prompts]
        requests = [
            Request(tokens=np.array(prompt["prompt_token_ids"]), noise=noise_of(one.seed, one.max_tokens))
            for prompt, one in zip(prompts, sampling_params, strict=True)
        ]
        self.served.replica.end = sampling_params[0].stop[0]
        said = self.served.replica.generate(requests, temperature=sampling_params[0].temperature)
        return [self._output(request, one) for request, one in zip(requests, said, strict=True)]

    def _scored(self, tokens):
        replica = self.served.replica
        with torch.no_grad():
            logs = replica.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        said = [
            {token: SimpleNamespace(logprob=float(row[token]))} for row, token in zip(logs, tokens[1:], strict=False)
        ]
        return SimpleNamespace(prompt_logprobs=[None, *said])

    def _output(self, request, said):
        full = np.zeros((len(said.experts), 3, 3), np.uint8)
        full[:, list(self.served.replica.blocks)] = said.experts
        logprobs = [
            {token: SimpleNamespace(logprob=logprob, rank=1, decoded_token=None)}
            for token, logprob in zip(said.tokens.tolist(), said.logprobs.tolist(), strict=True)
        ]
        answer = SimpleNamespace(
            index=0, text="", token_ids=said.tokens.tolist(), cumulative_logprob=None, logprobs=logprobs,
            routed_experts=full, finish_reason="stop" if said.ended else "length", stop_reason=None,
        )  # fmt: skip
        self.spoil(answer)
        return SimpleNamespace(
            request_id="0", prompt_token_ids=request.tokens.tolist(), outputs=[answer], finished=True
        )


def vllm_engine(model, group, tmp_path, options=None, *, cpu=False, keeps=False):
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
    kind = type("LLM", (LLM,), {"keeps": keeps})
    library = SimpleNamespace(LLM=kind, SamplingParams=SamplingParams, platforms=platforms)
    return VLLMEngine(
        group, model_from_config(model.config.to_dict()), end=END, folder=tmp_path / "weights", dtype="float32",
        vocabulary=300, max_tokens=20, files={"config.json": model.config_file(torch.float64)}, options=options or {},
        load=lambda: library,
    )  # fmt: skip


def answer_with_all(engine, model, weights):
    """Hand over three different sets of weights and ask with each; the number of starts before every answer."""
    before, starts = len(LLM.made), []
    for version in range(3):
        current = {name: value * (1 + 0.01 * version) for name, value in weights.items()}
        engine.load_weights(iter(current.items()), version=version)
        starts.append(len(LLM.made) - before)
        found = engine.generate(requests_of(), temperature=1.0)
        same(found, embedded(model, current, requests_of(), 1.0))
        assert {one.version for one in found} == {version}
    return starts


def test_vllm_gives_the_numbers_of_the_embedded_engine(model, weights, group, tmp_path):
    engine = vllm_engine(model, group, tmp_path, {"gpu_memory_utilization": 0.4})
    assert answer_with_all(engine, model, weights) == [1, 1, 1]
    llm = LLM.made[-1]
    assert llm.calls == ["equilibra_load", "reset_prefix_cache"] * 2
    assert (llm.options, llm.dtype) == ({"gpu_memory_utilization": 0.4}, "float32")


def test_vllm_on_cpus_is_believed_once_an_update_equals_a_fresh_start(model, weights, group, tmp_path):
    engine = vllm_engine(model, group, tmp_path, {"enforce_eager": False}, cpu=True)
    assert answer_with_all(engine, model, weights) == [1, 2, 2]
    assert engine.in_place is True
    assert LLM.made[-1].calls == ["equilibra_load", "reset_prefix_cache"]
    assert LLM.made[-1].options == {"enforce_eager": False, "kv_cache_memory_bytes": 1 << 30}


def test_vllm_that_keeps_old_weights_is_started_anew(model, weights, group, tmp_path, caplog):
    engine = vllm_engine(model, group, tmp_path, cpu=True, keeps=True)
    assert answer_with_all(engine, model, weights) == [1, 2, 3]
    assert engine.in_place is False
    assert "every update starts it anew" in caplog.text


@pytest.mark.parametrize("version", ["0.27.1", "0.31.0+cpu", "0.32.0", "1.0.0", "unknown", "0.1.dev1"])
def test_versions_of_vllm_that_do_not_fit(version):
    with pytest.raises(InputError, match=rf"vLLM {version.replace('+', '.')} is not supported: .*install 0\.30"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.29.1", "0.30.0", "0.30.0+cpu"])
def test_versions_of_vllm_that_fit(version):
    check_version(version)
    if version < "0.30":
        with pytest.raises(InputError, match=r"before 0\.30 its CPU build cannot return routed experts"):
            check_version(version, cpu=True)


@pytest.mark.parametrize(("change", "reason"), [
    ({"routed_experts": None}, "no token has routing"),
    ({"logprobs": None}, "log-probs of 0"),
    ({"token_ids": []}, "request 0, answer 0: routing of"),
    ({"routed_experts": np.zeros((1, 3, 3), np.uint8)}, "request 0, answer 0: routing of 1 tokens came"),
])  # fmt: skip
def test_vllm_answers_that_cannot_be_used(change, reason, model, weights, group, tmp_path):
    engine = vllm_engine(model, group, tmp_path)
    engine.load_weights(iter(weights.items()))
    LLM.made[-1].spoil = lambda answer: vars(answer).update(change)
    with pytest.raises(InputError, match=reason):
        engine.generate(requests_of(), temperature=1.0)


def test_vllm_that_is_not_there_or_told_what_the_run_decides(model, group, tmp_path):
    with pytest.raises(InputError, match=r"rollout\.engine vllm needs vLLM"):
        import_vllm()
    with pytest.raises(InputError, match="dtype, model cannot be settings"):
        vllm_engine(model, group, tmp_path, options={"dtype": "half", "model": "x"})


def test_the_same_noise_gives_the_same_seed():
    one, other = requests_of(2)
    assert seed_of(one) == seed_of(Request(tokens=other.tokens, noise=one.noise.copy()))
    assert seed_of(one) != seed_of(other)
    assert 0 <= seed_of(one) < 2**31
