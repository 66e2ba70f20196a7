"""What cannot work is refused before anything is trained."""

import pytest

from equilibra.core.errors import InputError
from equilibra.train.build import build_parts
from equilibra.train.config import TrainConfig
from equilibra.train.config_files import with_overrides
from equilibra.train.worker import device_of


@pytest.mark.parametrize(("override", "reason"), [
    ("rollout.engine=vllm", "not installed"),
    ("rollout.engine=vlm", "one of embedded, disaggregated, sglang, vllm.*did you mean 'vllm'"),
    ("rollout.engine=sglang", "needs a server: set rollout.server"),
    ("rollout.options.swap_space=4", "rollout.options are for the disaggregated engine and vLLM on the ranks"),
    ("algorithm.mini_batches=33", "needs as many groups of answers, but a step has 32"),
    ("rollout.max_prompt_tokens=3", "tokens, but rollout.max_prompt_tokens is 3"),
    ("rollout.window=2", "needs whole answers"),
    ("algorithm.options.foo=1", "no option of grpo"),
])  # fmt: skip
def test_refused_before_the_warm_up(override, reason):
    with pytest.raises(InputError, match=reason):
        build_parts(with_overrides(TrainConfig(), [override]), None, None)


@pytest.mark.parametrize(("overrides", "reason"), [
    (["rollout.options.exports=2"], "has no exports for the disaggregated engine: use attention, devices, experts"),
    (["rollout.options.experts=0"], "experts must be"),
    (["rollout.options.transport=tcp"], "transport must be one of shared, gloo"),
    (["rollout.options.devices=cpu,cuda:1"], "devices = 'cpu,cuda:1': it must be cpu, or GPUs such as cuda:2,cuda:3"),
    (["rollout.options.kv_tokens=64"], "is 72, but an attention process has 64 tokens of KV cache: raise kv_tokens"),
    (["rollout.server=http://127.0.0.1:1"], "rollout.engine is disaggregated: set one of them"),
])  # fmt: skip
def test_pools_that_cannot_work_are_refused(overrides, reason):
    with pytest.raises(InputError, match=reason):
        build_parts(with_overrides(TrainConfig(), ["rollout.engine=disaggregated", *overrides]), None, None)


@pytest.mark.parametrize("path", ["ipc", "both"])
def test_paths_between_gpus_need_them(path):
    with pytest.raises(InputError, match=f"balance.path = {path} needs GPUs, but the run is on cpu"):
        device_of(with_overrides(TrainConfig(), ["run.device=cpu", f"balance.path={path}"]))
