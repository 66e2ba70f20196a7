"""Input that is damaged, that lies or that means harm is one InputError that says where; memory stays small."""

import base64
import io
import json
import pickle
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references.engine_formats import (
    MODEL,
    columns,
    known,
    nemo_batch,
    npy_base64,
    sglang_result,
    slime_sample,
    verl_batch,
    vllm_021_response,
    vllm_output,
    vllm_response,
)

from equilibra.core.errors import InputError
from equilibra.integrations import nemo_rl, sglang, slime, verl, vllm
from equilibra.integrations.responses import sequences_of_file
from equilibra.integrations.routing_formats import (
    RoutedModel,
    as_rows,
    from_base64,
    from_npy,
    model_from_config,
    model_from_folder,
    save_sequences,
)
from equilibra.trace.store import open_trace

ONE = known(4, 6)
SMALL = 16 << 20
"""bytes that nothing here may come near"""


def npy(array=None, *, shape=None, descr="|u1", header=None, version=1, data=b""):
    if array is not None:
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()
    text = header if header is not None else str({"descr": descr, "fortran_order": False, "shape": shape})
    text = text + " " * (-(len(text) + 11) % 64) + "\n"
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode("latin1") + data


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def pickled():
    file = io.BytesIO()
    np.save(file, np.array([Bomb()], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(("content", "reason"), [
    (npy(shape=(10**6, 10**6, 1), data=b"123"), "1000000000000 bytes, but 3"),
    (npy(shape=(10**30, 10**30, 10**30)), "but 0 bytes follow"),
    (npy(shape=(2, 2, -1), data=b"1234"), "but 4 bytes follow"),
    (npy(shape=(2, 2, 2), data=b"1234567"), "8 bytes, but 7"),
    (npy(shape=(2, 2, 2), data=b"123456789"), "8 bytes, but 9"),
    (npy(shape=(1, 1, 1), descr="<f4", data=b"1234"), "integers, not float32"),
    (npy(shape=(1, 1, 1), descr="|b1", data=b"1"), "integers, not bool"),
    (npy(shape=(1,), descr=[("a", "<i4"), ("b", "|O")], data=b"1" * 12), "Python objects"),
    (npy(shape=(1,), descr=[("a", "<i4")], data=b"1234"), "integers"),
    (pickled(), "Python objects"),
    (npy(header="{" * 3000), "not a readable .npy"),
    (npy(header="'a'" * 30_000, version=2), "not a readable .npy"),
    (npy(header="__import__('os').system('false')"), "not a readable .npy"),
    (npy(shape=(1, 1, 1), version=3, data=b"1"), "version"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "not a readable .npy"),
    (npy(np.zeros((2, 2, 2), np.uint8))[:9], "not a readable .npy"),
    (pickle.dumps([1, 2]), "not a readable .npy"),
    (b"", "not a readable .npy"),
])  # fmt: skip
def test_npy_that_lies_is_refused_before_memory_is_taken(content, reason):
    tracemalloc.start()
    with pytest.raises(InputError, match=reason):
        from_npy(content)
    assert tracemalloc.get_traced_memory()[1] < SMALL
    tracemalloc.stop()


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_array_or_an_input_error(content):
    for candidate in (content, npy(shape=(1, 1, 1))[: len(content)] + content):
        with suppress(InputError):
            from_npy(candidate)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_npy_is_noticed_or_of_its_own_size(data):
    whole = bytearray(npy(columns(ONE)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InputError):
        assert from_npy(bytes(whole)).nbytes <= len(whole)


@pytest.mark.parametrize(("text", "reason"), [
    *((text, "not valid base64") for text in ("AAA", "A===", "AA*A", "AAAA\n", "ÄÄÄÄ")),
    ("A" * 4000, "more than the 64 bytes"), (7, "not int"), (None, "not NoneType"),
])  # fmt: skip
def test_base64_that_is_none_or_too_long(text, reason):
    with pytest.raises(InputError, match=reason):
        from_base64(text, max_bytes=64)


def test_base64_has_room_for_what_is_allowed_and_no_more():
    assert from_base64(base64.b64encode(b"1" * 64).decode(), max_bytes=64) == b"1" * 64
    with pytest.raises(InputError, match="66 bytes"):
        from_base64(base64.b64encode(b"1" * 66).decode(), max_bytes=65)


@pytest.mark.parametrize("values", [
    [[[1, 2], [3]]], [[[1.5]]], [[["a"]]], [[[10**30]]], [[1, 2]], [[[True]]], [[[None]]], object(), "text",
    np.zeros((2, 2), int), np.array([[[Bomb]]], object),
])  # fmt: skip
def test_rows_that_are_no_whole_numbers(values):
    with pytest.raises(InputError):
        as_rows(values)


def response(value, *, tokens=(4, 6)):
    body = vllm_response([ONE])
    body["choices"][0]["routed_experts"] = value
    body["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), tokens, strict=True))
    return body


def spoiled(place, value):
    full = columns(ONE, np.int32)
    full[place] = value
    return npy_base64(full)


@pytest.mark.parametrize(("body", "reason"), [
    (response(npy_base64(columns(ONE)[:-1])), "choice 0: routing of 8 tokens came, but a sequence of 10"),
    (response(npy_base64(columns(ONE)), tokens=(4, 5)), "routing of 9 tokens came, but a sequence of 9"),
    (response(npy_base64(columns(ONE)), tokens=(0, 0)), "at least one token"),
    (response(npy_base64(columns(ONE)[:, :4])), "routing of 4 layers and 3 experts per token came"),
    (response(npy_base64(columns(ONE)[..., :2])), "routing of 5 layers and 2 experts per token came"),
    (response(npy_base64(columns(ONE)[0])), r"not of shape \(5, 3\)"),
    (response(spoiled((2, 1, 0), 16)), "expert id 16 is out of range"),
    (response(spoiled((2, 1, 0), -1)), "expert id -1 is out of range"),
    (response(spoiled((2, 1), -2)), "expert id -2 is out of range"),
    (response(spoiled((2, 3, 1), 5)), "layer 3 is said to be dense, but row 2"),
    (response("AAAA*"), "not valid base64"),
    (response(npy_base64(columns(ONE))[:-9]), "not valid base64|bytes follow"),
    (response({"data": 1}), "an array, a tensor or lists, not dict"),
    (response([[[0, 1], [2]]]), "lists of equal length"),
    (response(npy_base64(columns(ONE)), tokens=("4", 6)), "prompt_tokens must be a number of tokens"),
    (response(npy_base64(columns(ONE)), tokens=(4, True)), "completion_tokens must be a number of tokens"),
    ({"choices": None}, "list of choices"), ({"choices": [7]}, "list of choices"), ({}, "list of choices"),
    ({"choices": [{}], "usage": []}, "usage must be a table"), ({"choices": [{}, {}]}, "no number of tokens"),
])  # fmt: skip
def test_vllm_responses(body, reason):
    with pytest.raises(InputError, match=reason):
        list(vllm.sequences_of_response(body, MODEL))


def test_vllm_021_parts_must_fit():
    body = vllm_021_response(ONE)
    body["prompt_routed_experts"].pop()
    with pytest.raises(InputError, match="routing of 3 tokens of a prompt of 4"):
        list(vllm.sequences_of_response(body, MODEL))
    body = vllm_021_response(ONE)
    body["choices"][0]["routed_experts"] = columns(ONE)[4:].tolist()
    with pytest.raises(InputError, match=r"the prompt has shape \(4, 3, 3\), of the answer \(5, 5, 3\)"):
        list(vllm.sequences_of_response(body, MODEL))


def test_vllm_outputs_say_which_request_is_wrong():
    good, bad = vllm_output([ONE]), vllm_output([ONE, ONE])
    bad.outputs[1].routed_experts = bad.outputs[1].routed_experts[1:]
    with pytest.raises(InputError, match="request 1, answer 1: routing of 8 tokens"):
        list(vllm.sequences_of_outputs([good, bad], MODEL))


@pytest.mark.parametrize(("change", "reason"), [
    ({"routed_experts": base64.b64encode(columns(ONE, np.int32).tobytes()[:-4]).decode()}, "not a whole number"),
    ({"routed_experts": base64.b64encode(columns(ONE, np.int32)[:-1].tobytes()).decode()}, "result 0: routing of 8"),
    ({"routed_experts": "AAA"}, "not valid base64"),
    ({"completion_tokens": None}, "must have prompt_tokens"),
    ({"prompt_tokens": -1}, "number of tokens"),
    ({"prompt_tokens": 10**12}, "number of tokens"),
    ({"routed_experts": base64.b64encode((columns(ONE, np.int32) + 16).tobytes()).decode()}, "said to be dense"),
])  # fmt: skip
def test_sglang_results(change, reason):
    result = sglang_result(ONE)
    result["meta_info"].update(change)
    with pytest.raises(InputError, match=reason):
        list(sglang.sequences_of_response([result], MODEL))


@pytest.mark.parametrize("body", [None, 7, "text", [], {}, {"meta_info": 3}, [[]], {"choices": 7}])
def test_what_is_no_response_of_sglang(body):
    if body == []:
        assert list(sglang.sequences_of_response(body, MODEL)) == []
        return
    with pytest.raises(InputError):
        list(sglang.sequences_of_response(body, MODEL))


def test_a_prefix_that_was_left_out_must_be_said():
    with pytest.raises(InputError, match="if the request left out a prefix, give its length"):
        list(sglang.sequences_of_response(sglang_result(ONE, first=3), MODEL))
    with pytest.raises(InputError, match="whose first 2 are left out has 7 rows"):
        list(sglang.sequences_of_response(sglang_result(ONE, first=3), MODEL, first=2))
    with pytest.raises(InputError, match="a start from 0 on"):
        list(sglang.sequences_of_response(sglang_result(ONE), MODEL, first=-1))


def test_verl_batches():
    batch = verl_batch([ONE], prompt_width=5, response_width=7)
    del batch.batch["attention_mask"]
    with pytest.raises(InputError, match="has no attention_mask"):
        list(verl.sequences_of_batch(batch, MODEL))
    for place, reason in (((0, 4), "has a gap"), ((0, slice(None)), "no tokens")):
        batch = verl_batch([ONE], prompt_width=5, response_width=7)
        batch.batch["attention_mask"][place] = 0
        with pytest.raises(InputError, match=f"sequence 0: .*{reason}"):
            list(verl.sequences_of_batch(batch, MODEL))
    batch = verl_batch([ONE], prompt_width=5, response_width=7)
    batch.batch["attention_mask"] = batch.batch["attention_mask"][:, 1:]
    with pytest.raises(InputError, match="but the attention mask"):
        list(verl.sequences_of_batch(batch, MODEL))
    batch = verl_batch([ONE], prompt_width=5, response_width=7)
    batch.non_tensor_batch["uid"] = ["a", "b"]
    with pytest.raises(InputError, match="as many uids"):
        list(verl.sequences_of_batch(batch, MODEL))


def test_slime_samples():
    for change, reason in (
        ({"tokens": []}, "no tokens"), ({"response_length": 11}, "does not fit 10"),
        ({"tokens": [1] * 9}, "routing of 9"),
        ({"rollout_routed_experts": np.zeros((9, 45), np.int32)}, "must be .tokens, layers, k."),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"sample 1: .*{reason}"):
            list(slime.sequences_of_samples([slime_sample(ONE, 0), {**vars(slime_sample(ONE, 0)), **change}], MODEL))


def test_nemo_batches():
    batch = nemo_batch([ONE], width=12)
    for change, reason in (
        ({"input_lengths": np.array([13])}, "13 tokens; the batch has rows for 1 to 12"),
        ({"input_lengths": np.array([0])}, "0 tokens"), ({"input_lengths": np.array([1, 1])}, "as many lengths"),
        ({"routed_experts": None}, "must have routed_experts"),
        ({"generation_lengths": np.array([11])}, "prompt of -1"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=reason):
            list(nemo_rl.sequences_of_batch({**batch, **change}, MODEL))


@pytest.mark.parametrize(("line", "reason"), [
    *((line, "not valid JSON") for line in (b"{", b"\xff\xfe", b"[" * 4000)),
    *((line, "neither a vLLM response") for line in (b"7", b"[]", b'{"choices": []}', b'{"response": 7}')),
    (b'{"response": {}, "request": 7}', "request must be a table"),
    (b'{"a": "' + b"x" * 5000 + b'"}', "longer than 4,096 bytes"), (b'{"choices": [7]}', "list of choices"),
])  # fmt: skip
def test_lines_of_a_file(line, reason, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(sglang_result(known(2, 2))).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(InputError, match=f"a.jsonl, line 3: .*{reason}"):
        list(sequences_of_file(file, MODEL, max_line_bytes=4096))


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(InputError, match="cannot read"):
            list(sequences_of_file(path, MODEL))
    with pytest.raises(InputError, match="not of 'trtllm'"):
        list(sequences_of_file(tmp_path, MODEL, engine="trtllm"))


def test_a_broken_line_leaves_no_trace_behind(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(sglang_result(ONE)) + "\n{")
    for target in ("b.eqtrace", "b.npz"):
        with pytest.raises(InputError, match="line 2"):
            save_sequences(sequences_of_file(file, MODEL), tmp_path / target, MODEL)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_without_any_routing_is_refused(tmp_path):
    result = sglang_result(ONE)
    result["meta_info"]["routed_experts"] = None
    with pytest.raises(InputError, match="no token has routing"):
        save_sequences(sglang.sequences_of_response(result, MODEL), tmp_path / "a.eqtrace", MODEL)
    with pytest.raises(InputError, match="empty trace"):
        save_sequences(iter(()), tmp_path / "a.eqtrace", MODEL)


def test_many_sequences_are_written_in_the_memory_of_one(tmp_path):
    """Lines of 5.6 MB, in less memory than six of them, however many there are."""
    model = RoutedModel(num_layers=16, top_k=8, num_experts=64)
    one = known(4000, 4193, model=model)
    line = json.dumps(sglang_result(one, model=model)) + "\n"
    file = tmp_path / "a.jsonl"
    with file.open("w") as out:
        out.writelines(line for _ in range(24))
    tracemalloc.start()
    made = save_sequences(sequences_of_file(file, model), tmp_path / "a.eqtrace", model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made == (24 * 8193, 24)
    assert open_trace(tmp_path / "a.eqtrace").tokens_without_routing == 24
    assert peak < 6 * len(line), f"{peak / len(line):.1f} lines"


@pytest.mark.parametrize(("change", "reason"), [
    ({"num_layers": 0}, "num_layers"), ({"top_k": True}, "top_k"), ({"num_experts": 2}, "3 experts per token"),
    ({"dense_layers": (3, 0)}, "in order"), ({"dense_layers": (0, 5)}, "from 0 to 4"),
    ({"dense_layers": (0, 0)}, "different"),
    ({"dense_layers": (0, 1, 2, 3, 4)}, "all 5 layers are dense"), ({"num_experts": 10**9}, "num_experts"),
])  # fmt: skip
def test_models_that_cannot_be(change, reason):
    with pytest.raises(InputError, match=reason):
        RoutedModel(**{"num_layers": 5, "top_k": 3, "num_experts": 16, **change})


@pytest.mark.parametrize("change", [
    {"num_experts": None}, {"num_hidden_layers": 10**9}, {"num_hidden_layers": "5"}, {"num_experts_per_tok": 0},
    {"mlp_only_layers": 3}, {"decoder_sparse_step": -1}, {"moe_layer_freq": [1, 0]}, {"first_k_dense_replace": 99},
])  # fmt: skip
def test_configurations_that_cannot_be(change, tmp_path):
    config = {"num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 3, **change}
    with pytest.raises(InputError):
        model_from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json"):
        model_from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_config_files_that_are_none(content, tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        model_from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match="cannot read"):
        model_from_folder(tmp_path)
