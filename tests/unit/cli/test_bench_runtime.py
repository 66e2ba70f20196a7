"""`equilibra bench runtime`: what it prints, its exit codes, and that no process stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.ranks import start_server

from benchmarks.runtime import figures as runtime
from equilibra.cli.main import main
from equilibra.trace.open import save_trace
from equilibra.trace.routing import RoutingTrace
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

pytest.importorskip("torch")
FIGURES = {"share_of_balanced", "speedup_over_static", "static_imbalance", "runtime_overhead"}
CONTENDERS = ["static", "eplb-oracle", "equilibra", "forced-balanced"]


def run(*words: object) -> int:
    try:
        return main(["bench", "runtime", *(str(word) for word in words)])
    except SystemExit as error:
        return int(error.code)


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    start_server()


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    size = SynthShape(num_prompts=16, answers_per_prompt=4, num_layers=4, num_experts=8, top_k=2)
    made = synthesize(size, SynthKnobs(popularity_skew=1.5, median_length=150.0), seed=1, record_last_token=False)
    file = tmp_path_factory.mktemp("runtime") / "made.npz"
    save_trace(made, file)
    return file


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> Path:
    """Most tokens go to experts of rank 0: copies pay even in small layers."""
    generator = np.random.default_rng(0)
    ids = np.where(generator.random((8000, 1)) < 0.9, generator.integers(0, 2, (8000, 1)), 3)[:, :, None]
    file = tmp_path_factory.mktemp("runtime") / "skewed.eqtrace"
    save_trace(RoutingTrace(ids=ids.astype(np.uint8), offsets=np.arange(0, 8001, 200), num_experts=4), file)
    return file


def test_json_has_the_figures_with_their_spreads(trace, capsys):
    assert run("--trace", trace, "--quick", "--repeats", 3, "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)  # nothing else on stdout
    assert set(result) >= FIGURES
    for name in FIGURES:
        assert result[name]["low"] <= result[name]["median"] <= result[name]["high"], name
    (case,) = result["cases"]
    assert case["case"] == "made, layers and micro-batches evenly spread"
    assert {name: len(times) for name, times in case["seconds"].items()} == dict.fromkeys([*CONTENDERS, "plain"], 3)
    assert case["settings"]["layers"] == [1, 3]
    assert case["settings"]["notes"][0] == "64 tokens without recorded routing left out"
    assert [plan["contender"] for plan in case["contenders"]] == CONTENDERS
    times = {name: np.array(values) for name, values in case["seconds"].items()}
    for name, ratios in (
        ("share_of_balanced", times["forced-balanced"] / times["equilibra"]),
        ("speedup_over_static", times["static"] / times["equilibra"]),
        ("runtime_overhead", times["static"] / times["plain"] - 1),
    ):
        assert result[name]["median"] == pytest.approx(np.median(ratios))
        assert (result[name]["low"], result[name]["high"]) == pytest.approx((ratios.min(), ratios.max()))
    assert {"cpu", "cores", "commit", "torch", "load_average"} <= set(result["environment"])
    assert result["command"] == "equilibra bench runtime --trace made.npz --select even --repeats 3 --quick"
    assert "repeat 3 of 3" in printed.err


@pytest.mark.parametrize("path", ["collective", "host"])
def test_executed_rows_are_the_simulated_ones_also_with_copies(skewed, path, capsys):
    shape = ("--tokens", 4000, "--hidden", 48, "--ffn", 48, "--layers", 1, "--repeats", 1, "--path", path)
    assert run("--trace", skewed, *shape, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    (case,) = result["cases"]
    plans = {plan["contender"]: plan for plan in case["contenders"]}
    assert result["static_imbalance"]["of_step"] > 1.7
    assert plans["static"]["imbalance"] == pytest.approx(result["static_imbalance"]["of_step"])
    assert plans["equilibra"]["flash_copies"]["update"] > 0
    assert plans["equilibra"]["imbalance"] < 1.05
    assert plans["forced-balanced"]["imbalance"] < 1.001
    assert case["token_counts_equal"] is True
    assert case["counts_compared"] == 4 * 2 * 3 * 2  # contenders, ranks, passes, micro-batches
    assert case["largest_difference"] < 1e-5


def test_tables_and_files_also_where_there_is_one_core(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "cores_for_ranks", lambda: None)
    assert run("--trace", trace, "--quick", "--repeats", 1, "--output", tmp_path) == 0
    table, told = capsys.readouterr()
    assert "the ranks share one" in told
    assert (tmp_path / "runtime.md").read_text().strip() == table.strip()
    assert all(word in table for word in (*CONTENDERS, "measured", "made.npz", "share_of_balanced_reach", "equal ("))
    written = json.loads((tmp_path / "runtime.json").read_text())
    assert set(written) >= FIGURES
    assert list(written["sections"]) == ["figures", "times"]
    assert "the ranks share one" in written["warnings"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "missing.npz"], "no such file"),
        (["--traces", "missing"], "no folder"),
        (["--trace", "TRACE", "--traces", "."], "either --trace FILE or --traces DIR"),
        (["--trace", "TRACE", "--layers", "9"], "4 MoE layers, 9"),
        (["--trace", "TRACE", "--micro-batches", "900", "--tokens", "4096"], "900 were asked for"),
        (["--trace", "TRACE", "--output", "missing"], "create it first"),
        (["--trace", "TRACE", "--hidden", "99999", "--ffn", "99999"], "use smaller --hidden"),
        (["--trace", "TRACE", "--repeats", "0"], "above 0"),
        (["--path", "pigeon"], "invalid choice"),
    ],
)
def test_what_cannot_be_run_is_exit_code_2_and_one_clear_line(words, message, trace, capsys):
    assert run(*(trace if word == "TRACE" else word for word in words)) == 2
    assert message in capsys.readouterr().err


def test_another_file_of_that_name_is_not_overwritten(trace, tmp_path, capsys):
    (tmp_path / "runtime.json").write_text("mine")
    assert run("--trace", trace, "--quick", "--output", tmp_path) == 2
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "runtime.json").read_text() == "mine"


def test_without_torch_it_says_what_to_install(trace, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "find_spec", lambda _name: None)
    assert run("--trace", trace, "--quick") == 2
    assert "pip install 'equilibra[torch]'" in capsys.readouterr().err


def test_other_benches_do_without_torch():
    code = "import sys; import benchmarks.planner, benchmarks.runtime.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_ranks_end_with_the_command(trace, number, code):
    command = [sys.executable, "-m", "equilibra", "bench", "runtime", "--quick", "--repeats", "100000"]
    started = subprocess.Popen([*command, "--trace", trace], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in started.stderr:
        if line.startswith("repeat 2"):
            break
    children = _children(started.pid)
    children += [rank for server in children for rank in _children(int(server))]
    assert len(children) >= 4, "the resource tracker, the fork server and its two ranks"
    started.send_signal(number)
    _, said = started.communicate(timeout=20)
    assert started.returncode == code
    assert "Traceback" not in said
    end = time.monotonic() + 10
    while any(_runs(int(child)) for child in children):
        assert time.monotonic() < end, f"{children} have stayed behind"
        time.sleep(0.05)


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
