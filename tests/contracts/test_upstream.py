"""What integrations use of vLLM, SGLang, slime and NeMo-RL is in lists, and the lists are in the sources."""

import ast
import inspect
from dataclasses import fields

import numpy as np
import pytest
from tests.contracts.upstream_names import PACKAGES, listed, missing, sources

from equilibra.integrations.sglang import engine as sglang_engine
from equilibra.integrations.slime import hooks
from equilibra.integrations.vllm import engine as vllm_engine
from equilibra.integrations.vllm.worker import WeightUpdate
from equilibra.rl.engine import Request


@pytest.mark.parametrize("package", PACKAGES)
def test_sources_have_what_is_listed(package):
    found = sources(package)
    if not found:
        pytest.skip(f"no source of {package}: install it, or put it into the folder of EQUILIBRA_UPSTREAM")
    wrong = {where: missing(root, listed(package)) for where, root in found}
    assert not any(wrong.values()), f"{package} is not as it was read in {listed(package)['read_in']}: {wrong}"


def constants(module):
    """The strings in a module's code."""
    tree = ast.parse(inspect.getsource(module))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def texts(package):
    return {text.strip('"') for texts in listed(package)["texts"].values() for text in texts}


@pytest.mark.parametrize(
    ("package", "module"), [("vllm", vllm_engine), ("sglang", sglang_engine)], ids=["vllm", "sglang"]
)
def test_every_endpoint_is_listed(package, module):
    used = {text for text in constants(module) if text.startswith("/") and " " not in text}
    assert used
    assert used <= texts(package)


def test_what_vllm_is_started_and_asked_with_is_listed():
    known = listed("vllm")["fields"]
    started = {*vllm_engine.OURS, *vllm_engine.ON_CPUS, "max_model_len"}
    assert started <= set(known["engine/arg_utils.py EngineArgs"])
    asked = vllm_engine.sampling_of(Request(tokens=np.arange(3), noise=np.zeros(2)), temperature=1.0, end=1)
    assert {*asked, "prompt_logprobs"} <= set(known["sampling_params.py SamplingParams"])
    protocol = "entrypoints/scale_out/token_in_token_out/protocol.py"
    answered = {"choices", "token_ids", "logprobs", "routed_experts"}
    names = {name for kind in ("Request", "Response", "ResponseChoice") for name in known[f"{protocol} Generate{kind}"]}
    assert answered | {"sampling_params"} <= names
    assert answered <= constants(vllm_engine) | {"content"}


def test_the_worker_extension_does_not_hide_a_method_of_vllms_worker():
    """It refuses extensions with names that its worker has."""
    assert [name for name in vars(WeightUpdate) if not name.startswith("__")] == ["equilibra_load"]
    assert inspect.getsource(vllm_engine).count('"equilibra_load"') == 2, "in process and over HTTP"


def test_what_sglang_is_asked_with_is_listed():
    known = listed("sglang")["fields"]
    of_request = set(known["srt/managers/io_struct.py GenerateReqInput"])
    of_sampling = set(known["srt/sampling/sampling_params.py SamplingParams"])
    of_update = set(known["srt/managers/io_struct.py UpdateWeightFromDiskReqInput"])
    bodies = [
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(ast.parse(inspect.getsource(sglang_engine)))
        if isinstance(node, ast.Dict)
    ]
    assert len(bodies) == 3
    assert all(any(body <= names for names in (of_request, of_sampling, of_update)) for body in bodies)


@pytest.mark.parametrize("flag", ["before-log-prob", "before-train-step"])
def test_hooks_of_slime_are_listed(flag):
    assert f"--custom-megatron-{flag}-hook-path" in texts("slime")
    given = inspect.signature(getattr(hooks, flag.replace("-", "_"))).parameters
    assert f"({', '.join(given)})" in texts("slime")


def test_metrics_of_slime_are_listed_where_they_are_looked_for():
    places = [place for place in listed("slime")["parameters"] if " | " in place]
    assert len(places) == 3
    for package in ("observability", "utils"):
        assert all(f"{package}/" in place for place in places)
        assert f'"slime.{package}"' in inspect.getsource(hooks)


def test_differences_are_found(tmp_path):
    names = {
        "fields": {"a.py One": ["x", "y"], "a.py Two": ["z"]},
        "parameters": {"a.py One.go": ["self", "where"], "b.py | a.py start": ["how"], "b.py gone": []},
        "texts": {"a.py": ["words", "more words"], "c.py": ["any"]},
    }
    (tmp_path / "a.py").write_text(
        "class One:\n    x: int\n    def go(self, there): ...\ndef start(how, *, fast): 'words'\n"
    )
    assert missing(tmp_path, names) == [
        "One of a.py has no field y", "a.py has no Two",
        "One.go of a.py takes ['self', 'there'], not ['self', 'where']",
        "b.py has no gone", "a.py does not say more words", "c.py does not say any",
    ]  # fmt: skip


def test_the_engines_of_servers_have_the_same_settings():
    assert {one.name for one in fields(vllm_engine.VLLMServerEngine)} == {
        one.name for one in fields(sglang_engine.SGLangEngine)
    }
