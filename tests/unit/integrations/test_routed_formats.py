"""Routing built exactly to each engine's format comes back as it was, with what engines do not know left open."""

import base64
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references.engine_formats import (
    MODEL,
    columns,
    known,
    nemo_batch,
    npy_base64,
    sglang_choice,
    sglang_result,
    slime_sample,
    verl_batch,
    vllm_021_response,
    vllm_output,
    vllm_response,
)
from tests.references.hf_models import CONFIGS, small_config
from transformers import AutoModelForCausalLM

from equilibra.core.errors import InputError
from equilibra.integrations import nemo_rl, sglang, slime, verl, vllm
from equilibra.integrations.responses import sequences_of_file
from equilibra.integrations.routing_formats import RoutedModel, model_from_config, save_sequences
from equilibra.trace.open import load_trace

ONES = [known(4, 6), known(4, 1), known(7, 3)]


def check(sequence, one, *, missing=(), prompt=True):
    """Routing of all tokens but the last and those that are missing."""
    assert sequence.num_tokens == one.num_tokens
    expected = np.ones(one.num_tokens, bool)
    expected[[*missing, -1]] = False
    np.testing.assert_array_equal(sequence.recorded, expected)
    np.testing.assert_array_equal(sequence.ids[expected], one.ids[expected[:-1]])
    assert sequence.ids.dtype == np.uint8
    assert sequence.prompt_length == (one.prompt if prompt else None)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_vllm_in_process(dtype):
    outputs = [vllm_output(ONES[:2], dtype=dtype), vllm_output(ONES[2:], dtype=dtype)]
    for sequence, one in zip(vllm.sequences_of_outputs(outputs, MODEL), ONES, strict=True):
        check(sequence, one)


def test_vllm_that_was_asked_to_leave_out_a_prefix():
    (sequence,) = vllm.sequences_of_outputs([vllm_output(ONES[:1], first=3)], MODEL, first=3)
    check(sequence, ONES[0], missing=range(3))


@pytest.mark.parametrize("token_ids", [False, True])
def test_vllm_over_http(token_ids):
    response = json.loads(json.dumps(vllm_response(ONES[:2], token_ids=token_ids)))
    for sequence, one in zip(vllm.sequences_of_response(response, MODEL), ONES[:2], strict=True):
        check(sequence, one)


@pytest.mark.parametrize("last_too", [False, True])
def test_vllm_021_has_prompt_and_answer_apart(last_too):
    response = vllm_021_response(ONES[0])
    if last_too:
        answer = response["choices"][0]["routed_experts"]
        answer.append(answer[-1])
    response["prompt_routed_experts"][1] = [[-1] * 3] * 3  # the prefix cache had it
    (sequence,) = vllm.sequences_of_response(response, MODEL)
    check(sequence, ONES[0], missing=[1])


def test_vllm_021_with_an_answer_of_one_token():
    response = vllm_021_response(ONES[1])
    assert response["choices"][0]["routed_experts"] == []
    (sequence,) = vllm.sequences_of_response(response, MODEL)
    check(sequence, ONES[1])


def test_sglang_generate():
    results = json.loads(json.dumps([sglang_result(one) for one in ONES]))
    for sequence, one in zip(sglang.sequences_of_response(results, MODEL), ONES, strict=True):
        check(sequence, one)
    (alone,) = sglang.sequences_of_response(results[2], MODEL)
    check(alone, ONES[2])


def test_sglang_start_len_and_forgotten_rows():
    result = sglang_result(ONES[0], first=2)
    (sequence,) = sglang.sequences_of_response(result, MODEL, first=2)
    check(sequence, ONES[0], missing=range(2))
    full = columns(ONES[0], np.int32)
    full[5] = -1
    result["meta_info"]["routed_experts"] = torch.from_numpy(full)  # with skip_tokenizer_init
    check(sglang.sequence_of_result(result, MODEL), ONES[0], missing=[5])


@pytest.mark.parametrize("before_0_5_9", [False, True])
def test_sglang_completions(before_0_5_9):
    (sequence,) = sglang.sequences_of_response(sglang_choice(ONES[0], before_0_5_9=before_0_5_9), MODEL)
    check(sequence, ONES[0])


def test_sglang_completions_have_routing_of_the_first_choice_alone():
    response = sglang_choice(ONES[0])
    response["choices"].append({"index": 1})
    with pytest.raises(InputError, match=r"choice 1: SGLang returns the routing of the first choice alone: ask with n"):
        list(sglang.sequences_of_response(response, MODEL))


@pytest.mark.parametrize("tensors", [False, True])
def test_verl_padded(tensors):
    batch = verl_batch(ONES, prompt_width=9, response_width=8)
    if tensors:
        batch.batch = {name: torch.from_numpy(value) for name, value in batch.batch.items()}
    found = list(verl.sequences_of_batch(batch, MODEL))
    for sequence, one in zip(found, ONES, strict=True):
        check(sequence, one)
    assert [sequence.group for sequence in found] == [0, 0, 1]


def test_verl_rows_that_nobody_wrote_are_routed_live():
    batch = verl_batch(ONES, prompt_width=7, response_width=6)
    batch.batch["routed_experts"][0, 5] = 0
    first = next(verl.sequences_of_batch(batch, MODEL))
    check(first, ONES[0], missing=[2])


def test_verl_without_padding():
    parts = [torch.from_numpy(np.concatenate([columns(one, np.int16), np.zeros((1, 5, 3), np.int16)])) for one in ONES]
    routed = torch.nested.nested_tensor(parts, layout=torch.jagged)
    tokens = [torch.zeros(one.num_tokens, dtype=torch.long) for one in ONES]
    batch = {"routed_experts": routed, "input_ids": torch.nested.nested_tensor(tokens, layout=torch.jagged)}
    for sequence, one in zip(verl.sequences_of_batch(batch, MODEL), ONES, strict=True):
        check(sequence, one, prompt=False)


def test_slime_samples():
    groups = [[slime_sample(ONES[0], 7), slime_sample(ONES[1], 7)], vars(slime_sample(ONES[2], 8))]
    found = list(slime.sequences_of_samples(groups, MODEL))
    for sequence, one in zip(found, ONES, strict=True):
        check(sequence, one)
    assert [sequence.group for sequence in found] == [7, 7, 8]


def test_slime_samples_without_routing_are_routed_live():
    lost = slime_sample(ONES[1], 7)
    lost.rollout_routed_experts = None
    found = list(slime.sequences_of_samples([slime_sample(ONES[0], 7), lost], MODEL))
    assert found[1].num_tokens == ONES[1].num_tokens
    assert not found[1].recorded.any()
    assert sum(int((~one.recorded).sum()) for one in found) == 1 + ONES[1].num_tokens


@pytest.mark.parametrize("tensors", [False, True])
def test_nemo_rl(tensors):
    batch = nemo_batch(ONES, width=12)
    batch["routed_experts"][0, 3] = -1
    batch["generation_lengths"] = np.array([one.answer for one in ONES])
    if tensors:
        batch = {name: torch.from_numpy(value) for name, value in batch.items()}
    for number, sequence in enumerate(nemo_rl.sequences_of_batch(batch, MODEL)):
        check(sequence, ONES[number], missing=[3] if number == 0 else [])


def test_one_expert_per_token_zeros_are_routing():
    model = RoutedModel(num_layers=2, top_k=1, num_experts=4)
    batch = {"routed_experts": np.zeros((1, 5, 2, 1), np.int16), "attention_mask": np.ones((1, 5), int)}
    (sequence,) = verl.sequences_of_batch(batch, model)
    assert sequence.recorded.tolist() == [True] * 4 + [False]


def test_more_than_256_experts():
    model = RoutedModel(num_layers=2, top_k=2, num_experts=384)
    one = known(3, 4, model=model)
    response = vllm_response([ONES[0]])
    response["usage"] = {"prompt_tokens": 3, "completion_tokens": 4}
    response["choices"][0]["routed_experts"] = npy_base64(one.ids.astype(np.uint16))
    (sequence,) = vllm.sequences_of_response(response, model)
    assert sequence.ids.dtype == np.uint16
    np.testing.assert_array_equal(sequence.ids[:-1], one.ids)


def test_engines_and_frameworks_agree(tmp_path):
    """The same routing by five ways is the same trace, in memory and on disk."""
    ways = {
        "vllm": vllm.sequences_of_outputs([vllm_output([one]) for one in ONES], MODEL),
        "sglang": sglang.sequences_of_response([sglang_result(one) for one in ONES], MODEL),
        "verl": verl.sequences_of_batch(verl_batch(ONES, prompt_width=7, response_width=6), MODEL),
        "slime": slime.sequences_of_samples([slime_sample(one, 0) for one in ONES], MODEL),
        "nemo": nemo_rl.sequences_of_batch(nemo_batch(ONES, width=10), MODEL),
    }
    for name, sequences in ways.items():
        kept = list(sequences)
        recorded = np.concatenate([sequence.recorded for sequence in kept])
        for suffix in ("eqtrace", "npz"):
            assert save_sequences(kept, tmp_path / f"{name}.{suffix}", MODEL) == (25, 3)
            stored = load_trace(tmp_path / f"{name}.{suffix}")
            assert stored.tokens_without_routing == 3
            ids = np.concatenate([piece.ids for piece in stored.pieces()])
            np.testing.assert_array_equal(ids, np.concatenate([sequence.ids for sequence in kept]))
            np.testing.assert_array_equal(ids[recorded], np.concatenate([one.ids for one in ONES]))
            np.testing.assert_array_equal(stored.offsets, [0, 10, 15, 25])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".eqtrace"] * 5 + [".npz"] * 5


def test_files_of_responses(tmp_path):
    lines = [
        vllm_response(ONES[:2]), sglang_result(ONES[2]), [sglang_result(ONES[0])], sglang_choice(ONES[1]),
        sglang_choice(ONES[2], before_0_5_9=True),
        {"request": {"routed_experts_start_len": 3}, "response": sglang_result(ONES[0], first=3)},
        {"request": {"sampling_params": {"routed_experts_prompt_start": 2}},
         "response": vllm_response(ONES[2:], first=2)},
    ]  # fmt: skip
    file = tmp_path / "responses.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = list(sequences_of_file(file, MODEL))
    expected = [
        (ONES[0], 0),
        (ONES[1], 0),
        (ONES[2], 0),
        (ONES[0], 0),
        (ONES[1], 0),
        (ONES[2], 0),
        (ONES[0], 3),
        (ONES[2], 2),
    ]
    for sequence, (one, first) in zip(found, expected, strict=True):
        check(sequence, one, missing=range(first))


@pytest.mark.parametrize("family", CONFIGS)
def test_dense_layers_are_those_of_transformers(family):
    config = small_config(family)
    layers = AutoModelForCausalLM.from_config(config).model.layers
    model = model_from_config(json.loads(config.to_json_string(use_diff=False)))
    assert model.moe_layers == tuple(n for n, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert (model.num_experts, model.top_k) == (8, config.num_experts_per_tok)


def test_published_configurations():
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
                "moe_layer_freq": 1}  # fmt: skip
    assert model_from_config(deepseek).dense_layers == (0, 1, 2)
    qwen = {"num_hidden_layers": 6, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 2}
    assert model_from_config({"text_config": qwen}).dense_layers == (0, 2, 4)
    glm = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
           "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
    assert model_from_config(glm).dense_layers == (0,)


def test_converters_need_no_engine_and_no_torch():
    program = (
        "import sys; import equilibra.integrations.responses, equilibra.integrations.verl; "
        "import equilibra.integrations.slime, equilibra.integrations.nemo_rl; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm', 'sglang', 'verl', 'slime')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@given(
    prompt=st.integers(1, 6), answer=st.integers(1, 6), skipped=st.integers(0, 12), lost=st.sets(st.integers(0, 10)),
    dense=st.sets(st.integers(0, 4), max_size=4), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_sequence_comes_back(prompt, answer, skipped, lost, dense, seed):
    """Whatever was left out at the start, forgotten in the middle, and whichever layers are dense."""
    model = RoutedModel(num_layers=5, top_k=3, num_experts=16, dense_layers=tuple(sorted(dense)))
    one = known(prompt, answer, seed=seed, model=model)
    first, missing = min(skipped, len(one.ids)), sorted(row for row in lost if row < len(one.ids))
    full = columns(one, np.int32, model=model)
    full[missing] = -1
    response = vllm_response([one], first=first, model=model)
    response["choices"][0]["routed_experts"] = npy_base64(full[first:])
    result = sglang_result(one, first=first, model=model)
    result["meta_info"]["routed_experts"] = base64.b64encode(full[first:].tobytes()).decode()
    for found in (
        vllm.sequences_of_response(response, model, first=first),
        sglang.sequences_of_response(result, model, first=first),
    ):
        (sequence,) = found
        check(sequence, one, missing=sorted({*range(first), *missing}))
        experts = sequence.experts()
        assert (experts[~sequence.recorded[:-1]] == -1).all()
        np.testing.assert_array_equal(experts[sequence.recorded[:-1]], one.ids[sequence.recorded[:-1]])
