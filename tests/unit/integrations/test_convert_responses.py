"""`equilibra trace convert` on files of responses."""

import argparse
import json

import numpy as np
import pytest
from tests.references.engine_formats import known, sglang_result, vllm_response

from equilibra.cli.trace import add_parser
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.open import load_trace

ONES = [known(4, 6), known(5, 2)]
MODEL = ["--layers", "5", "--top-k", "3", "--experts", "16", "--dense", "0,3"]


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["trace", *map(str, words)])
    return arguments.run(arguments)


@pytest.fixture
def files(tmp_path):
    for name, make in (("sglang", sglang_result), ("vllm", lambda one: vllm_response([one]))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(make(one)) + "\n" for one in ONES))
    return tmp_path


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("suffix", ["npz", "eqtrace"])
def test_responses_become_a_recording(engine, suffix, files, capsys):
    target = files / f"out.{suffix}"
    assert run("convert", files / f"{engine}.jsonl", target, *MODEL, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"target": str(target), "tokens": 17, "sequences": 2}
    trace = load_trace(target)
    assert (trace.shape, trace.num_experts) == ((17, 3, 3), 16)
    assert trace.prompt_length_of_sequence.tolist() == [4, 5]
    ids = np.concatenate([piece.ids for piece in trace.pieces()])
    np.testing.assert_array_equal(ids[trace.recorded], np.concatenate([one.ids for one in ONES]))


def test_the_model_comes_from_its_folder(files):
    config = {"num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 3, "mlp_only_layers": [0, 3]}
    (files / "config.json").write_text(json.dumps(config))
    (files / "responses.txt").write_bytes((files / "sglang.jsonl").read_bytes())
    assert run("convert", files / "responses.txt", files / "a.eqtrace", "--model", files, "--format", "sglang") == 0
    assert load_trace(files / "a.eqtrace").shape == (17, 3, 3)


def test_what_requests_left_out(files):
    lines = [json.dumps(sglang_result(one, first=2)) for one in ONES]
    (files / "late.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"late\.jsonl, line 1: result 0: routing of 7 tokens"):
        run("convert", files / "late.jsonl", files / "a.eqtrace", *MODEL)
    assert run("convert", files / "late.jsonl", files / "a.eqtrace", *MODEL, "--start-len", "2") == 0
    assert load_trace(files / "a.eqtrace").tokens_without_routing == 2 * 2 + 2


@pytest.mark.parametrize(("words", "error", "reason"), [
    (["sglang.jsonl", "a.eqtrace"], InputError, "num_layers, top_k, num_experts: give --model"),
    (["sglang.jsonl", "a.eqtrace", *MODEL[:-2]], InputError, "layers 0, 3 are zeros throughout"),
    (["sglang.jsonl", "a.eqtrace", *MODEL, "--format", "vllm"], InputError, "list of choices"),
    (["sglang.jsonl", "a.eqtrace", "--model", "."], InputError, "cannot read config.json"),
    (["sglang.jsonl", "a.txt", *MODEL], InputError, "must end in"),
    (["sglang.jsonl", "no/such/a.npz", *MODEL], InputError, "does not exist"),
    (["step_1.pt", "a.npz", *MODEL], TraceFormatError, r"\.pt files are pickles"),
    (["step_1.pkl", "a.npz"], TraceFormatError, r"\.pkl files are pickles"),
    (["a.npz", "b.npz", "--layers", "5"], InputError, "--layers are for responses"),
    (["none.jsonl", "a.npz", *MODEL], InputError, "cannot read none.jsonl"),
])  # fmt: skip
def test_bad_input_is_an_error_and_leaves_no_file(files, monkeypatch, words, error, reason):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    with pytest.raises(error, match=reason):
        run("convert", *words)
    assert sorted(files.iterdir()) == before


def test_a_pickled_npz_is_refused(files):
    np.savez(files / "a.npz", ids=np.array([{"a": 1}], object), offsets=[0, 1])
    with pytest.raises(TraceFormatError, match="Python objects, which are never read"):
        run("convert", files / "a.npz", files / "b.eqtrace")
