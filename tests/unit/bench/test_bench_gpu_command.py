"""`equilibra bench gpu`: what it prints and writes, and its exit codes, with the host as the device."""

import json
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

from benchmarks.gpu.contenders import NAMES
from benchmarks.gpu.records import load_records
from equilibra.cli.main import main
from equilibra.trace.open import save_trace
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

SMALL = ("--device", "cpu", "--hidden", 16, "--ffn", 16, "--tokens-per-rank", 64, "--repeats", 2, "--ranks-per-node", 4)


def run(*words: object) -> int:
    try:
        return main(["bench", "gpu", *(str(word) for word in words)])
    except SystemExit as error:
        return int(error.code)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    size = SynthShape(num_prompts=6, answers_per_prompt=4, num_layers=4, num_experts=16, top_k=2)
    file = tmp_path_factory.mktemp("traces") / "made.npz"
    save_trace(synthesize(size, SynthKnobs(popularity_skew=1.5, median_length=40.0, max_length=120)), file)
    return file


def test_json_has_the_figures_and_files_are_written_and_drawn_again(trace, tmp_path, capsys):
    assert run(*SMALL, "--trace", trace, "--ranks", 4, "--ranks", 8, "--ranks", 5, "--json", "--output", tmp_path) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)  # nothing else on stdout
    assert [case["case"] for case in result["cases"]] == ["made, 16x16, EP 4", "made, 16x16, EP 8"]
    for case in result["cases"]:
        assert set(case["share_of_balanced"]) == set(case["layer_us"]) == set(NAMES)
        for found in (*case["share_of_balanced"].values(), *case["exposed_share"].values()):
            assert found["low"] <= found["high"]
            assert len(found["repeats"]) == 2
        assert case["online"]["plan_us"] > 0
    assert result["case"] in {case["case"] for case in result["cases"]}
    assert result["left_out"][0]["case"] == "made, 16x16, EP 5"
    assert result["command"].startswith("equilibra bench gpu --trace made.npz --hidden 16 --ffn 16 --ranks 4 --ranks 8")
    assert {"device", "torch", "triton", "commit"} <= set(result["environment"])
    assert "[2/2] made, 16x16, EP 8" in printed.err
    page = (tmp_path / "gpu.md").read_text()
    for word in (*NAMES, "measured", "made.npz", "Roofline", "Left out", "made, 16x16, EP 5", "whole nodes"):
        assert word in page, word
    records = load_records(tmp_path / "gpu-records.npz")
    assert len(records.of("made, 16x16, EP 8")) == len(NAMES) * 4 * 2 * 8  # layers x micro-batches, repeats, ranks
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["share_of_balanced"] == result["share_of_balanced"]
    measurements = json.loads((tmp_path / "gpu-measurements.json").read_text())["measurements"]
    assert {one["kind"] for one in measurements} == {"experts"}
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "gpu.png").stat().st_size > 1000
    (tmp_path / "gpu.md").unlink()
    assert run("--redraw", "--output", tmp_path) == 0
    assert (tmp_path / "gpu.md").read_text() == page
    capsys.readouterr()
    assert run(*SMALL, "--trace", trace, "--ranks", 2, "--path", "host", "--keep", "--json", "--output", tmp_path) == 0
    both = json.loads(capsys.readouterr().out)
    assert [case["ranks"] for case in both["cases"]] == [2, 4, 8]
    assert "--path host" in both["command"]
    assert len(load_records(tmp_path / "gpu-records.npz").cases) == 3


def test_what_is_said_to_run_without_a_gpu_does(monkeypatch, capsys):
    monkeypatch.delenv("EQUILIBRA_TRACES", raising=False)
    # the sizes that the error names where there is no GPU
    sizes = ("--hidden", 64, "--ffn", 64, "--tokens-per-rank", 64)
    assert run("--device", "cpu", *sizes, "--ranks", 8, "--repeats", 1) == 0
    printed = capsys.readouterr()
    assert "synthetic, 64x64, EP 8" in printed.out
    assert "left out" not in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--output", "nowhere"), "there is no folder nowhere"),
        (("--redraw",), "--output"),
        (("--device", "cpu", "--hidden", 16), "go together"),
        (("--device", "cpu", "--hidden", 16, "--ffn", 16, "--model", "olmoe"), "either --model"),
        (("--device", "cpu", "--model", "nobody"), "no model is named"),
        (("--device", "cpu", "--trace", "a.npz", "--traces", "b"), "either --trace"),
        (("--device", "cpu", "--spare-slots", "-1"), "spare_slots"),
    ],
)
def test_wrong_questions_end_with_a_reason(words, said, capsys, monkeypatch):
    monkeypatch.delenv("EQUILIBRA_TRACES", raising=False)
    assert run(*words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"cases": [{"case": "of an older version"}], "left_out": []}'])
def test_other_peoples_files_are_not_replaced(text, tmp_path, capsys):
    (tmp_path / "gpu.json").write_text(text)
    assert run(*SMALL, "--output", tmp_path) == 2
    assert "not a result of this bench" in capsys.readouterr().err
    assert (tmp_path / "gpu.json").read_text() == text
