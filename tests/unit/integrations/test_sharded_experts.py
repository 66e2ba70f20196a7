"""`set_experts_implementation("equilibra")`: outputs and gradients are those of transformers' own experts."""

import pytest
import torch
from tests.distributed.hf_experts import check, hidden, plain, sequences
from tests.distributed.ranks import run_ranks
from tests.references.hf_models import save_small

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.execute import join_expert_group
from equilibra.integrations.hf import register_experts, shard_experts

DIGITS = {torch.float64: 1e-6, torch.float32: 2e-4}
"""transformers computes routers in float32 inside a float64 model"""


@pytest.fixture
def group():
    return join_expert_group(Cluster(num_nodes=1, ranks_per_node=1), timeout_s=10)


def close(found, dtype):
    assert abs(found["shifted loss"]) > 1e-4, "replayed experts are not the live ones"
    small = {name: abs(value) for name, value in found.items() if name not in ("shifted loss", "copies")}
    assert max(small.values()) < DIGITS[dtype], small


@pytest.mark.parametrize(("family", "dtype", "checkpointing"), [
    ("qwen3_moe", torch.float64, False), ("qwen3_moe", torch.float32, True), ("deepseek_v3", torch.float64, False),
    ("olmoe", torch.float64, False), ("mixtral", torch.float64, False), ("gpt_oss", torch.float64, False),
])  # fmt: skip
def test_one_process_computes_what_transformers_computes(family, dtype, checkpointing, tmp_path):
    save_small(family, tmp_path / "model", dtype=dtype)
    close(check(tmp_path / "model", 1, dtype, checkpointing), dtype)


def test_two_ranks_compute_what_transformers_computes(tmp_path):
    save_small("qwen3_moe", tmp_path / "model", dtype=torch.float64)
    for found in run_ranks(2, check, tmp_path / "model", 2, torch.float64, False, timeout_s=200):
        close(found, torch.float64)
        assert found["copies"] > 0


def test_logits_and_generation_without_a_plan(group, tmp_path):
    save_small("qwen3_moe", tmp_path / "model")
    theirs, mine = (plain(tmp_path / "model", torch.float32).eval() for _ in range(2))
    shard_experts(mine, group)
    tokens = sequences()[1][None]
    with torch.no_grad():
        torch.testing.assert_close(mine(input_ids=tokens).logits, theirs(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert mine.generate(tokens, **options).tolist() == theirs.generate(tokens, **options).tolist()


def test_what_cannot_be_sharded(group, tmp_path):
    save_small("gpt_oss", tmp_path / "gpt")
    gpt = plain(tmp_path / "gpt", torch.float32)
    gpt.config.swiglu_limit = 5.0
    with pytest.raises(InputError, match=r"swiglu_limit are \(1.702, 5.0\)"):
        shard_experts(gpt, group)
    save_small("qwen3_moe", tmp_path / "qwen")
    model = plain(tmp_path / "qwen", torch.float32)
    register_experts()
    model.set_experts_implementation("equilibra")
    tokens = sequences()[0][None]
    with pytest.raises(InputError, match="call shard_experts"):
        hidden(model, tokens, torch.ones_like(tokens))
    shard_experts(model, group)
    with pytest.raises(InputError, match="sharded already"):
        shard_experts(model, group)


def test_activations_are_computed_anew_inside_a_micro_batch_only(group, tmp_path):
    save_small("qwen3_moe", tmp_path / "model")
    model = plain(tmp_path / "model", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard_experts(model, group)
    tokens = sequences()[0][None]
    loss = hidden(model, tokens, torch.ones_like(tokens)).sum()
    with pytest.raises(InputError, match="cannot recompute activations outside of"):
        loss.backward()
