"""The commands that others script: names, keys, exit codes, nothing on stdout but data."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

import equilibra
from benchmarks.problems import zipf_loads
from equilibra.cli import trace
from equilibra.cli.main import main


def run(*words: str) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return int(error.code)


def save(path, array) -> str:
    np.save(path, array)
    return str(path)


def loads_file(tmp_path, problems=4, ranks=8, experts=32):
    made = [zipf_loads(num_ranks=ranks, num_experts=experts, start=2, seed=seed) for seed in range(problems)]
    return save(tmp_path / "loads.npy", np.stack(made))


def test_help_is_instant_and_loads_nothing_heavy():
    start = time.perf_counter()
    code = "import sys; from equilibra.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('numpy', 'numba')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout
    assert time.perf_counter() - start < 5  # measured 0.1 s; the limit allows for a busy machine


def test_plan_loads_prints_the_promised_keys(tmp_path, capsys):
    file = loads_file(tmp_path)
    assert run("plan", "--loads", file, "--nodes", 1, "--ranks-per-node", 8, "--spare-slots", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"imbalance_before", "imbalance_after", "lower_bound", "copies", "solve_us_median"}
    assert len(result["copies"]) == 4
    for before, after, bound in zip(
        result["imbalance_before"], result["imbalance_after"], result["lower_bound"], strict=True
    ):
        assert before == pytest.approx(2, abs=0.05)
        assert bound - 1e-12 <= after <= bound * 1.005
    assert result["solve_us_median"] > 0


def test_plan_loads_by_source_gives_the_same_balance(tmp_path, capsys):
    loads = np.stack([zipf_loads(num_ranks=8, num_experts=32, start=3, seed=seed) for seed in range(3)])
    by_source = np.random.default_rng(0).multinomial(loads, np.full(8, 1 / 8)).transpose(0, 2, 1)
    results = []
    for name, array in (("a.npy", loads), ("b.npy", by_source)):
        assert run("plan", "--loads", save(tmp_path / name, array), "--json") == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["imbalance_after"] == results[1]["imbalance_after"]
    assert results[0]["copies"] == results[1]["copies"]


def test_tolerance_buys_fewer_copies(tmp_path, capsys):
    file = loads_file(tmp_path, ranks=64, experts=256)
    copies = []
    for tolerance in (0.1, 0.01):
        assert run("plan", "--loads", file, "--ranks-per-node", 64, "--tolerance", tolerance, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert max(result["imbalance_after"]) <= 1 + tolerance
        copies.append(sum(result["copies"]))
    assert copies[0] < copies[1]


def test_zero_loads_and_no_slots(tmp_path, capsys):
    file = save(tmp_path / "z.npy", np.array([[0] * 16, [9] + [0] * 15]))
    assert run("plan", "--loads", file, "--spare-slots", 0, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["imbalance_after"] == [1.0, 8.0]
    assert result["lower_bound"] == [1.0, 8.0]
    assert result["copies"] == [0, 0]


BAD = {
    "floats": np.ones((2, 16)),
    "nan": np.full((2, 16), np.nan),
    "negative": np.full((2, 16), -1),
    "one axis": np.ones(16, int),
    "four axes": np.ones((1, 1, 1, 16), int),
    "empty": np.ones((0, 16), int),
    "experts not divisible": np.ones((2, 15), int),
    "other sources": np.ones((2, 3, 16), int),
    "too large": np.full((2, 16), 2**40),
    "strings": np.array([["a"]]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_loads_end_with_code_2_and_one_line(name, tmp_path, capsys):
    assert run("plan", "--loads", save(tmp_path / "bad.npy", BAD[name]), "--json") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("equilibra: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00", b"PK\x03\x04 cut off", None])
def test_bad_files_end_with_code_2(content, tmp_path, capsys):
    path = tmp_path / "bad.npy"
    if content is not None:
        path.write_bytes(content)
    assert run("plan", "--loads", path) == 2
    assert run("plan", "--loads", tmp_path) == 2
    assert capsys.readouterr().err.count("equilibra: ") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--tolerance", "nan"],
        ["--tolerance", "-1"],
        ["--output", "p.npz"],
        ["--model", "olmoe"],
        ["--spare-slots", "-1"],
    ],
)
def test_options_that_make_no_sense_are_refused(words, tmp_path, capsys):
    assert run("plan", "--loads", loads_file(tmp_path), *words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run("plan", "--loads", "") == 2


def test_pickles_are_never_loaded(tmp_path, capsys):
    np.save(tmp_path / "p.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    assert run("plan", "--loads", tmp_path / "p.npy") == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "--loads", "x.npy", "--nodes", "0"],
        ["plan", "--loads", "x.npy", "--ranks-per-node", "many"],
        ["plan", "--loads", "x.npy", "--trace", "y.npz"],
        ["nothing"],
        [],
    ],
)
def test_bad_words_end_with_code_2(words, capsys):
    assert run(*words) == 2
    assert capsys.readouterr().out == ""


def test_a_step_is_planned_saved_and_continued(tmp_path, capsys):
    trace, plan = tmp_path / "trace.npz", tmp_path / "plan.npz"
    made = ["--layers", 2, "--experts", 16, "--top-k", 2, "--prompts", 8, "--answers", 4]
    made += ["--median-length", 100, "--max-length", 256]
    assert run("trace", "synth", trace, *made) == 0
    step = ["plan", "--trace", trace, "--nodes", 2, "--ranks-per-node", 4, "--tokens-per-rank", 256, "--json"]
    capsys.readouterr()
    assert run(*step, "--output", plan) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["imbalance_after"] < first["imbalance_before"]
    assert run(*step, "--output", plan) == 2  # it exists
    assert run(*step, "--output", plan, "--overwrite", "--previous", plan) == 0
    assert run(*step, "--model", "deepseek-v3") == 2
    assert "16 experts" in capsys.readouterr().err
    assert run(*step, "--planner", "nobody") == 2
    capsys.readouterr()
    digests = set()
    for tolerance in (0, 0.5):
        assert run(*step, "--tolerance", tolerance, "--max-moves", 0) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["moves"] == 0
        digests.add(planned["digest"])
    assert len(digests) == 2
    assert run(*step, "--previous", trace) == 2
    for empty in ("--output", "--previous", "--model"):
        assert run(*step, empty, "") == 2, "a variable of a script that is not set"
    assert run(*step, "--model", "moonlight", "--hardware", "") == 2
    for budget in (0, 10**20):
        assert run(*step, "--tokens-per-rank", budget) == 2


def test_bench_runs_quickly_and_writes_results(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("EQUILIBRA_TRACES", raising=False)
    only = ["--only", "flash_zipf", "--only", "counting", "--only", "flash_real"]
    assert run("bench", "planner", "--quick", *only, "--output", tmp_path, "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert "flash_real" in printed.err
    assert result["left_out"] == ["flash_real"]
    assert (tmp_path / "planner.md").read_text().startswith("# Planner bench")
    assert json.loads((tmp_path / "planner.json").read_text())["sections"].keys() == {"flash_zipf", "counting"}
    for row in result["sections"]["flash_zipf"]["rows"]:
        assert row["imbalance_worst"] <= 1 + row["tolerance"]
    assert run("bench", "planner", "--only", "nothing") == 2
    assert run("bench", "planner", "--output", tmp_path / "missing") == 2
    (tmp_path / "planner.json").write_text("[]")
    assert run("bench", "planner", "--only", "counting", "--output", tmp_path) == 2
    assert "not a result of this bench" in capsys.readouterr().err


def test_bench_is_found_from_any_folder(tmp_path):
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "equilibra", "bench", *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise AssertionError('not ours')")
    asked = command("planner", "--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith("usage: equilibra bench planner [-h] [--traces DIR]")
    assert command("--help").stdout.startswith("usage: equilibra bench [-h] BENCH ...")
    assert command().returncode == 2


def test_bench_of_an_installed_package_says_where_benches_run(tmp_path, monkeypatch, capsys):
    package = tmp_path / "lib" / "site-packages" / "equilibra"
    monkeypatch.setattr(equilibra, "__file__", str(package / "__init__.py"))
    for words in (["planner"], ["--help"], []):
        assert run("bench", *words) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("equilibra: benches need a clone of the repository")
        assert printed.err.count("\n") == 1


def test_an_interrupt_while_arguments_are_read_is_a_line(monkeypatch, capsys):
    def interrupted(_commands):
        raise KeyboardInterrupt

    monkeypatch.setattr(trace, "add_parser", interrupted)
    assert main(["trace", "show", "nothing"]) == 130
    assert capsys.readouterr().err == "equilibra: interrupted\n"


def test_hardware_without_a_model_is_refused(tmp_path, capsys):
    assert main(["plan", "--trace", str(tmp_path / "any.npz"), "--hardware", "h200"]) == 2
    assert "--hardware goes with --model" in capsys.readouterr().err
