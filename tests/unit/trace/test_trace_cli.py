import argparse
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from equilibra.cli.trace import add_parser
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.open import load_trace, save_trace


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["trace", *map(str, words)])
    return arguments.run(arguments)


@pytest.fixture
def file(full_trace, tmp_path):
    save_trace(full_trace, tmp_path / "a.npz")
    return tmp_path / "a.npz"


def test_info_prints_the_promised_keys(file, capsys):
    assert run("info", file, "--nodes", 2, "--ranks-per-node", 4, "--tokens-per-microbatch", 25, "--json") == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert {name: summary[name] for name in ("tokens", "sequences", "layers", "experts", "top_k")} == {
        "tokens": 50,
        "sequences": 3,
        "layers": 3,
        "experts": 16,
        "top_k": 4,
    }
    assert summary["tokens_without_routing"] == 3
    assert 1.0 < summary["imbalance_batch"] <= summary["imbalance_microbatch_mean"]
    assert summary["imbalance_microbatch_mean"] <= summary["imbalance_microbatch_p99"]
    assert printed.out.count("\n") == 1


def test_info_draws_a_table(file, capsys):
    assert run("info", file) == 0
    table = capsys.readouterr().out
    assert "3 MoE layers, 4 of 16 experts" in table
    assert "3 without routing" in table
    assert "█" in table


def test_convert_goes_there_and_back(file, full_trace, tmp_path, same, capsys):
    assert run("convert", file, tmp_path / "b.eqtrace") == 0
    assert run("convert", tmp_path / "b.eqtrace", tmp_path / "c.npz", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == 50
    same(load_trace(tmp_path / "c.npz"), full_trace)
    with pytest.raises(InputError, match="it exists"):
        run("convert", file, tmp_path / "b.eqtrace")
    assert run("convert", file, tmp_path / "b.eqtrace", "--overwrite") == 0


def test_a_trace_can_be_converted_onto_itself(file, full_trace, same):
    assert run("convert", file, file, "--overwrite") == 0
    same(load_trace(file), full_trace)


def test_synth_makes_what_was_asked(tmp_path, capsys):
    words = [
        "--experts",
        16,
        "--layers",
        2,
        "--top-k",
        2,
        "--prompts",
        3,
        "--answers",
        2,
        "--median-length",
        50,
    ]
    assert run("synth", tmp_path / "a.eqtrace", *words, "--drift", 0.5, "--seed", 3, "--no-last-token", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["knobs"]["drift"] == 0.5
    trace = load_trace(tmp_path / "a.eqtrace")
    assert trace.shape == (made["tokens"], 2, 2)
    assert trace.group_of_sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert trace.tokens_without_routing == 6


def test_synth_takes_after_a_recording(file, tmp_path, capsys):
    assert run("synth", tmp_path / "b.npz", "--like", file, "--prompts", 2, "--answers", 2, "--experts", 64) == 0
    assert "popularity_skew" in capsys.readouterr().out
    assert load_trace(tmp_path / "b.npz").shape[1:] == (3, 4)
    assert load_trace(tmp_path / "b.npz").num_experts == 64


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["info", "missing.npz"], TraceFormatError),
        (["info", "."], TraceFormatError),
        (["info", "a.npz", "--ranks-per-node", "3"], InputError),
        (["info", "a.npz", "--ranks-per-node", "0"], InputError),
        (["info", "a.npz", "--tokens-per-microbatch", "0"], InputError),
        (["info", "a.npz", "--experts", "4"], TraceFormatError),
        (["convert", "a.npz", "b.txt"], InputError),
        (["convert", "a.npz", "no/such/folder/b.npz"], InputError),
        (["convert", "a.npz", "a.npz"], InputError),
        (["convert", "missing.npz", "b.npz"], TraceFormatError),
        (["synth", "b.npz", "--experts", "4", "--top-k", "8"], InputError),
        (["synth", "b.npz", "--popularity-skew", "nan"], InputError),
        (["synth", "b.npz", "--seed", "-1"], InputError),
        (["synth", "b.npz", "--step", "-1"], InputError),
        (["synth", "b.npz", "--like", "missing.npz"], TraceFormatError),
        (["synth", "b", "--prompts", "1"], InputError),
    ],
)
def test_bad_input_is_an_error_and_leaves_no_file(file, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        run(*words)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.npz"]


def test_repeated_experts_are_refused_on_request(tmp_path):
    ids = np.zeros((4, 1, 2), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", ids=ids, offsets=[0, 4], num_experts=8)
    assert run("info", tmp_path / "a.npz") == 0
    with pytest.raises(InputError, match="4 of 4 tokens"):
        run("info", tmp_path / "a.npz", "--distinct")


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    program = f"""
import argparse, signal
from equilibra.cli.trace import add_parser
signal.signal(signal.SIGINT, signal.default_int_handler)
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
arguments = parser.parse_args(["trace", "synth", {str(tmp_path / "a.eqtrace")!r}, "--prompts", "4000"])
arguments.run(arguments)
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".*/ids-00000.bin")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.glob(".*/ids-00000.bin")), "it began to write"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_can_be_built_without_numpy():
    program = "import sys; import equilibra.cli.trace; sys.exit('numpy' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
