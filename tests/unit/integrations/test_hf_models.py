"""Models of every family: ours computes what transformers computes, and saves what transformers loads."""

import pytest
import torch
import transformers
from tests.references.hf_models import CONFIGS, save_small, small_config

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.execute import CopySetting, join_expert_group
from equilibra.integrations.hf import build_model, open_model_folder

pytestmark = pytest.mark.arithmetic

ALONE = Cluster(num_nodes=1, ranks_per_node=1)


def built(folder, *, dtype=torch.float32, **options):
    group = join_expert_group(ALONE, timeout_s=10)
    return build_model(
        open_model_folder(folder), group, CopySetting(), seed=3, dtype=dtype, device=torch.device("cpu"), **options
    )


def logits(model, tokens, mask):
    return model.head(model.hidden(tokens, mask))


def tokens_and_mask():
    tokens = torch.randint(0, 300, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    return tokens, mask


@pytest.mark.parametrize("family", CONFIGS)
def test_computes_what_transformers_computes(family, tmp_path):
    theirs = save_small(family, tmp_path / "model")
    ours = built(tmp_path / "model")
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
        got = logits(ours, tokens, mask)[mask.bool()]
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_transformers(family, tmp_path):
    theirs = save_small(family, tmp_path / "model").train()
    ours = built(tmp_path / "model")
    tokens, mask = tokens_and_mask()
    (theirs(input_ids=tokens, attention_mask=mask).logits[mask.bool()].square().mean()).backward()
    (logits(ours, tokens, mask)[mask.bool()].square().mean()).backward()
    router = theirs.model.layers[2].mlp
    router = router.router if family == "gpt_oss" else router.gate
    mine = ours.moe_layers[-1].router.weight.grad
    assert mine.abs().max() > 0
    torch.testing.assert_close(mine, router.weight.grad, rtol=2e-3, atol=2e-5)
    torch.testing.assert_close(
        ours.model.model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, rtol=2e-3, atol=2e-5
    )
    first, last = ours.moe_layers[-1].experts.home_gradients(), theirs.model.layers[2].mlp.experts.down_proj.grad
    for expert, gradient in enumerate(first):
        expected = last[expert].t() if family == "gpt_oss" else last[expert]
        torch.testing.assert_close(gradient.down, expected, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_saves_what_transformers_loads(family, tmp_path):
    save_small(family, tmp_path / "model")
    ours = built(tmp_path / "model")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
    ours.runtime.weights_changed()
    ours.save(tmp_path / "saved", {})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        expected = logits(ours, tokens, mask)[mask.bool()]
        got = again(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
    assert again.dtype == torch.float32


@pytest.mark.parametrize("family", CONFIGS)
def test_a_fresh_model_depends_on_the_seed_alone(family, tmp_path):
    small_config(family).save_pretrained(tmp_path)
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        first, second = (logits(built(tmp_path), tokens, mask) for _ in range(2))
    assert torch.equal(first, second)
    assert first.std() > 0


def test_value_model_begins_at_zero_with_the_same_trunk(tmp_path):
    save_small("qwen3_moe", tmp_path / "model")
    policy, value = built(tmp_path / "model"), built(tmp_path / "model", value=True)
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        assert torch.equal(policy.hidden(tokens, mask), value.hidden(tokens, mask))
        assert value.head(value.hidden(tokens, mask)).abs().max() == 0


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "cannot read"),
    ("[]", "JSON object"),
    ("{}", "must have a model_type"),
    ('{"model_type": "llama"}', "not supported"),
    ('{"model_type": "qwen3_moe", "num_experts": -3}', "num_experts"),
    ('{"model_type": "mixtral", "router_jitter_noise": 0.1}', "without noise"),
    ('{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}', "quantized"),
    ('{"model_type": "qwen3_moe", "num_experts": "many"}', "cannot use"),
])  # fmt: skip
def test_a_folder_that_cannot_be_used(text, reason, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        open_model_folder(tmp_path)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        open_model_folder(tmp_path)
