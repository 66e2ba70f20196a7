"""`equilibra simulate` and `equilibra calibrate`: keys, values that agree, refusals, files, progress."""

import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.references.runs import TINY, make_run

from equilibra.cli import arguments
from equilibra.cli.main import main
from equilibra.core.model import model_named
from equilibra.cost.presets import load_prices, measured_h200
from equilibra.doctor import node
from equilibra.doctor.finding import Examination
from equilibra.doctor.measure import measured_of
from equilibra.events.run import Run, load_run, save_run
from equilibra.trace.open import load_trace

METRICS = {"step_time_s", "throughput_tokens_per_s", "speedup_over_static", "share_of_balanced", "imbalance_mean",
           "imbalance_p99", "copies_per_layer", "copy_bytes", "migration_bytes", "exposed_overhead_s",
           "peak_memory_bytes"}  # fmt: skip
DEFAULT = ["static", "eplb-history", "eplb-oracle", "lplb", "ultraep", "equilibra", "balanced"]
TINY_MODEL = "num_layers = 2\nhidden = 256\nexpert_ffn = 128\nnum_experts = 16\ntop_k = 2\n"


def run(*words: object) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return int(error.code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of two layers, 16 experts, top-2, and recordings that fit it."""
    folder = tmp_path_factory.mktemp("simulate")
    (folder / "tiny.toml").write_text(TINY_MODEL)
    shape = ["--layers", 2, "--experts", 16, "--top-k", 2, "--median-length", 100, "--max-length", 256]
    for seed, (name, size) in enumerate((("a", 16), ("b", 8))):
        made = ["--prompts", size, "--answers", 4, "--seed", seed]
        assert run("trace", "synth", folder / f"{name}.npz", *made, *shape) == 0
    other = ["--layers", 3, "--experts", 32, "--top-k", 4, "--prompts", 2, "--answers", 2, "--max-length", 64]
    assert run("trace", "synth", folder / "other.npz", *other) == 0
    return folder


@pytest.fixture
def ask(folder, capsys):
    """Run on the recordings; returns the JSON, or (code, stderr) if it was refused."""

    def asked(*words: object, trace: tuple[str, ...] = ("a",), small: bool = True):
        traces = [folder / f"{name}.npz" for name in trace]
        cluster = ["--ranks-per-node", 4, "--tokens-per-microbatch", 2048] if small else []
        capsys.readouterr()
        code = run("simulate", "--trace", *traces, "--model", folder / "tiny.toml", *cluster, "--json", *words)
        printed = capsys.readouterr()
        if code:
            assert printed.out == ""
            return code, printed.err
        return json.loads(printed.out)

    return asked


def test_the_promised_keys_and_values_that_agree(ask, folder):
    found = ask()
    recording = load_trace(folder / "a.npz")
    assert found["tokens"] == recording.offsets[-1]
    assert found["sequences"] == recording.num_sequences == 64
    assert (found["model"], found["hardware"], found["kind"]) == ("tiny", "h200", "simulated")
    assert found["settings"]["tokens_per_microbatch"] == 2048
    assert found["inputs"][0]["name"] == "a.npz"
    assert len(found["inputs"][0]["sha256"]) == 64
    planners = found["planners"]
    assert list(planners) == DEFAULT
    static, balanced = planners["static"], planners["balanced"]
    for name, row in planners.items():
        assert set(row) >= METRICS, name
        assert row["speedup_over_static"] == pytest.approx(static["step_time_s"] / row["step_time_s"])
        assert row["share_of_balanced"] == pytest.approx(balanced["step_time_s"] / row["step_time_s"])
        assert row["throughput_tokens_per_s"] == pytest.approx(found["tokens"] / row["step_time_s"])
        assert 0 < row["share_of_balanced"] <= 1
        assert 1 <= row["imbalance_mean"] <= row["imbalance_p99"]
        assert row["exposed_overhead_s"] >= 0
        assert row["peak_memory_bytes"] > 0
    assert static["speedup_over_static"] == balanced["share_of_balanced"] == balanced["imbalance_mean"] == 1
    assert static["copies_per_layer"] == static["copy_bytes"] == static["migration_bytes"] == 0
    assert planners["ultraep"]["copies_per_layer"] > 0 < planners["ultraep"]["copy_bytes"]
    assert planners["equilibra"]["imbalance_mean"] < static["imbalance_mean"]


def test_it_is_deterministic(ask):
    assert ask() == ask()


def test_static_imbalance_is_what_the_recording_says(ask, folder):
    """Counted from the ids, without any of our classes."""
    recording = load_trace(folder / "a.npz")
    ids = np.concatenate([piece.ids for piece in recording.pieces()])
    lengths = np.diff(recording.offsets)
    bounds, used = [0], 0
    for s, length in enumerate(lengths.tolist()):
        if used and used + length > 2048:
            bounds.append(s)
            used = 0
        used += length
    bounds.append(lengths.size)
    found = []
    for first, last in pairwise(bounds):
        part = ids[recording.offsets[first] : recording.offsets[last]]
        for layer in range(2):
            rank = np.bincount(part[:, layer].ravel().astype(int) // 4, minlength=4)
            found.append(rank.max() / rank.mean())
    row = ask("--planner", "static")["planners"]["static"]
    assert row["imbalance_mean"] == pytest.approx(np.mean(found))
    assert row["imbalance_p99"] == pytest.approx(np.percentile(found, 99))
    assert row["micro_batches"] == len(bounds) - 1


def test_several_recordings_are_joined(ask, folder):
    both = ask("--planner", "static", trace=("a", "b"))
    alone = [ask("--planner", "static", trace=(name,)) for name in ("a", "b")]
    assert both["tokens"] == sum(one["tokens"] for one in alone)
    assert [one["name"] for one in both["inputs"]] == ["a.npz", "b.npz"]
    assert both["planners"]["static"]["step_time_s"] > max(one["planners"]["static"]["step_time_s"] for one in alone)


EVERY_OPTION = {
    "--hardware": ["b200"], "--spare-slots": [1], "--standing-slots": [0], "--prefetch-depth": [3],
    "--logprob-path": ["host"], "--update-path": ["host"], "--pipeline-stages": [2], "--data-parallel": [2],
    "--optimizer-steps": [3], "--ranks-per-sequence": [1], "--no-activation-recompute": [],
    "--no-logprob-stage": [], "--nodes": [2], "--planner": ["equilibra", "ultraep", "lpt"],
}  # fmt: skip


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_every_option_is_heard(ask, option):
    plain, changed = ask(), ask(option, *EVERY_OPTION[option])
    assert changed["planners"] != plain["planners"] or option == "--standing-slots"
    assert changed["settings"] != plain["settings"] or option in ("--hardware", "--nodes", "--planner")
    if option == "--planner":
        assert list(changed["planners"]) == ["static", "equilibra", "ultraep", "lpt", "balanced"]
    if option in ("--no-activation-recompute", "--no-logprob-stage", "--hardware"):
        for name, row in changed["planners"].items():
            assert row["step_time_s"] < plain["planners"][name]["step_time_s"], name
    if option in ("--data-parallel", "--pipeline-stages"):
        assert changed["ranks"] == 8


def test_standing_copies_need_several_nodes(ask):
    with_, without = (
        ask("--nodes", 2, "--ranks-per-node", 2, "--spare-slots", 0, "--standing-slots", slots)["planners"]["equilibra"]
        for slots in (2, 0)
    )
    assert without["standing_copies_per_layer"] == 0
    assert with_["imbalance_mean"] <= without["imbalance_mean"]


def test_history_is_what_eplb_guesses_from(ask, folder):
    half, given = ask(), ask("--history", folder / "b.npz")
    assert given["planners"]["eplb-history"] != half["planners"]["eplb-history"]
    assert given["planners"]["eplb-oracle"] == half["planners"]["eplb-oracle"]


def refused(answer, *parts: str) -> None:
    code, text = answer
    assert code == 2
    assert text.startswith("equilibra: ")
    assert text.count("\n") == 1
    for part in parts:
        assert part in text


def test_a_recording_of_another_model_is_refused_with_both_shapes(ask, folder):
    shapes = "3 MoE layers, 32 experts, top-4", "2 MoE layers, 16 experts, top-2"
    refused(ask(trace=("other",)), "other.npz does not fit tiny", *shapes)
    refused(ask(trace=("a", "other")), *shapes)
    refused(ask("--history", folder / "other.npz"), *shapes)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--planner", "nobody"], ["no planner is named 'nobody'", "equilibra"]),
        (["--model", "nobody"], ["no model is named 'nobody'", "olmoe"]),
        (["--model", "nobody.toml"], ["cannot read nobody.toml"]),
        (["--hardware", "tpu"], ["no hardware is named 'tpu'", "h200"]),
        (["--ranks-per-node", 3], ["cannot give 16 experts equal homes on 3 ranks"]),
        (["--nodes", 3], ["cannot give 16 experts equal homes on 12 ranks"]),
        (["--tokens-per-microbatch", 50], ["tokens", "allow at least"]),
        (["--tokens-per-microbatch", 10**20], ["tokens_per_microbatch must be a whole number from 1 to"]),
        (["--spare-slots", -1], ["spare_slots"]),
        (["--spare-slots", 10**12], ["spare_slots"]),
        (["--standing-slots", -1], ["standing_slots"]),
        (["--prefetch-depth", -1], ["prefetch_depth"]),
        (["--prefetch-depth", 5000], ["prefetch_depth"]),
        (["--pipeline-stages", 3], ["2 layers cannot fill 3 pipeline stages"]),
        (["--data-parallel", 65], ["64 sequences cannot fill 65"]),
        (["--optimizer-steps", 60], ["micro-batches", "60 optimizer steps"]),
        (["--ranks-per-sequence", 3], ["3 ranks per sequence do not divide 4 ranks"]),
        (["--nodes", 10**6], ["num_nodes"]),
        (["--history", "missing.npz"], ["missing.npz"]),
        (["--trace", "missing.npz"], ["missing.npz"]),
        (["--output", "/nowhere/run"], ["/nowhere"]),
        (["--report", "/nowhere/x.html"], ["/nowhere"]),
        (["--perfetto", "/nowhere/x.json"], ["/nowhere"]),
    ],
)
def test_what_makes_no_sense_is_refused(ask, words, parts):
    refused(ask(*words), *parts)


@pytest.mark.parametrize("words", [
    ["--nodes", "0"], ["--nodes", "-1"], ["--nodes", "two"], ["--ranks-per-node", "0"],
    ["--tokens-per-microbatch", "0"], ["--tokens-per-microbatch", "-5"], ["--tokens-per-microbatch", "1e5"],
    ["--pipeline-stages", "0"],
    ["--data-parallel", "0"], ["--optimizer-steps", "0"], ["--ranks-per-sequence", "0"], ["--prompts", "0"],
    ["--answers", "0"], ["--logprob-path", "usb"], ["--spare-slots", "some"], ["--planner"], ["--trace"],
])  # fmt: skip
def test_words_that_are_not_numbers_or_choices(words, capsys):
    assert run("simulate", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words[0] in printed.err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not an archive", b"\x93NUMPY\x01\x00"])
def test_broken_recordings(content, folder, ask):
    (folder / "broken.npz").write_bytes(content)
    refused(ask(trace=("broken",)), "broken.npz")
    refused(ask(trace=("a", "broken")), "broken.npz")


def test_the_model_is_found_by_the_recordings_shape(folder, capsys):
    assert run("simulate", "--trace", folder / "a.npz") == 2
    assert "2 MoE layers, 16 experts, top-2" in capsys.readouterr().err


def test_files_are_written_once_and_never_over_others(ask, tmp_path, capsys):
    names = {"--output": tmp_path / "run", "--report": tmp_path / "r.html", "--perfetto": tmp_path / "p.json"}
    words = [word for pair in names.items() for word in pair]
    found = ask(*words)
    read = load_run(names["--output"])
    assert list(read.planners) == DEFAULT
    for name, record in read.planners.items():
        assert record.metrics == pytest.approx(found["planners"][name])
        assert sum(record.memory.values()) == pytest.approx(found["planners"][name]["peak_memory_bytes"])
    assert names["--report"].read_text().lower().startswith("<!doctype html")
    assert json.loads(names["--perfetto"].read_text())["traceEvents"]
    before = {path: path.stat().st_mtime_ns for path in names.values()}
    for option, path in names.items():
        refused(ask(option, path), "it exists", "--overwrite")
    assert before == {path: path.stat().st_mtime_ns for path in names.values()}
    assert ask(*words, "--overwrite") == {**found}
    assert all(path.stat().st_mtime_ns > before[path] for path in names.values())
    for name in ("pages.html", "pages.json"):
        (tmp_path / name).mkdir()
    refused(ask("--report", tmp_path / "pages.html", "--overwrite"), "folder")
    refused(ask("--output", tmp_path / "pages.html", "--overwrite"), "not a run folder")
    assert run("report", names["--output"], "--output", tmp_path / "again.html") == 0


def test_odd_sizes(folder, capsys, tmp_path):
    """One of everything, as many experts as ranks, no slots, one token: figures stay finite and in order."""
    one = tmp_path / "one.toml"
    one.write_text("num_layers = 1\nhidden = 64\nexpert_ffn = 32\nnum_experts = 8\ntop_k = 1\n")
    many = tmp_path / "many.toml"
    many.write_text("num_layers = 2\nhidden = 64\nexpert_ffn = 32\nnum_experts = 512\ntop_k = 10\n")
    few = ["--prompts", 2, "--answers", 2]
    for words in (
        [one, "--ranks-per-node", 1, "--prompts", 1, "--answers", 1],
        [one, "--ranks-per-node", 8, *few],
        [one, "--nodes", 8, "--ranks-per-node", 1, *few],
        [many, "--ranks-per-node", 8, *few],
        [folder / "tiny.toml", "--ranks-per-node", 4, "--spare-slots", 0, "--standing-slots", 0, *few],
        [folder / "tiny.toml", "--nodes", 2, "--ranks-per-node", 2, "--prefetch-depth", 0, *few],
        [folder / "tiny.toml", "--ranks-per-node", 4, "--tokens-per-microbatch", 1, *few],
        [folder / "tiny.toml", "--ranks-per-node", 4, "--tokens-per-microbatch", 2**40, *few],
        [folder / "tiny.toml", "--ranks-per-node", 2, "--data-parallel", 4, *few],
        [folder / "tiny.toml", "--ranks-per-node", 4, "--planner", "balanced", *few],
        [folder / "tiny.toml", "--ranks-per-node", 4, "--planner", "llep", "lpt", *few],
    ):
        capsys.readouterr()
        assert run("simulate", "--model", *words, "--json") == 0, words
        printed = capsys.readouterr()
        assert "synthetic routing, not yours" in printed.err
        for name, row in json.loads(printed.out)["planners"].items():
            assert all(np.isfinite(value) and value >= 0 for value in row.values()), (words, name)
            assert row["share_of_balanced"] <= 1 + 1e-12, (words, name)
            assert row["imbalance_mean"] >= 1


def test_the_table_says_the_same(folder, capsys):
    words = ["simulate", "--trace", folder / "a.npz", "--model", folder / "tiny.toml", "--ranks-per-node", 4,
             "--tokens-per-microbatch", 2048]  # fmt: skip
    assert run(*words) == 0
    table = capsys.readouterr().out
    assert run(*words, "--json") == 0
    planners = json.loads(capsys.readouterr().out)["planners"]
    for name, row in planners.items():
        [line] = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        assert f"{row['speedup_over_static']:.2f}x" in line
        assert f"{row['imbalance_mean']:.3f}" in line
    assert "Simulated" in table


@pytest.mark.parametrize("nodes", [1, 2])
def test_real_routing(traces, capsys, nodes):
    file = traces / "gpt-oss-20b.npz"
    if not file.exists():
        pytest.skip(f"no {file}")
    words = ["--ranks-per-node", 8, "--tokens-per-microbatch", 8192, "--planner", *DEFAULT, "lpt", "llep", "--json"]
    assert run("simulate", "--trace", file, "--nodes", nodes, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "gpt-oss-20b"  # found by its shape
    planners = found["planners"]
    if nodes == 1:
        assert planners["static"]["imbalance_mean"] == pytest.approx(1.586, abs=0.01)
    for name, row in planners.items():
        if name not in ("equilibra", "balanced"):
            assert planners["equilibra"]["step_time_s"] < row["step_time_s"], name
    assert planners["equilibra"]["speedup_over_static"] > 1.2


def measurements(path: Path, entries: object) -> Path:
    path.write_text(json.dumps({"measurements": entries}))
    return path


def test_calibrate_fits_and_simulate_uses_it(folder, tmp_path, capsys):
    file, out = measurements(tmp_path / "m.json", measured_h200()), tmp_path / "mine.toml"
    assert run("calibrate", file, "--base", "h100", "--name", "ours", "--output", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["measurements"]) == ("ours", len(measured_h200()))
    assert printed["errors"]["experts_forward"]["mean_error"] < 0.08
    assert run("calibrate", file, "--output", out) == 2
    assert "exists" in capsys.readouterr().err
    assert run("calibrate", file, "--output", out, "--overwrite") == 0
    words = ["--trace", folder / "a.npz", "--model", folder / "tiny.toml", "--ranks-per-node", 4]
    words += ["--tokens-per-microbatch", 2048, "--json"]
    results = []
    for machine in (out, "h200"):
        capsys.readouterr()
        assert run("simulate", *words, "--hardware", machine) == 0
        results.append(json.loads(capsys.readouterr().out)["planners"]["static"]["step_time_s"])
    assert results[0] == pytest.approx(results[1], rel=0.01)
    assert run("calibrate", file) == 0
    assert "[experts_forward]" in capsys.readouterr().out


def test_calibrate_measures_this_machine(tmp_path, capsys, monkeypatch):
    product = {"kind": "dense", "us_low": 1.0, "us_high": 1.0, "repeats": 5}
    cases = [{**product, "flop": flop, "us": flop / 2e6} for flop in (10**9, 10**10)]
    found = Examination(findings=[], measured=[measured_of("products", cases, amount="flop")], verdicts=[])
    monkeypatch.setattr(node, "examine", lambda _ask: found)
    out = tmp_path / "here.toml"
    assert run("calibrate", "--measure", "--name", "here", "--output", out) == 0
    printed = capsys.readouterr()
    assert "measured here: dense_tflops" in printed.err
    assert "fitted" not in printed.out
    assert load_prices(str(out)).dense_tflops == pytest.approx(2.0)
    links = [{"kind": "nic", "bytes": size, "us": 7 + size / 5e4} for size in (10**6, 10**8)]
    file = measurements(tmp_path / "links.json", links)
    assert run("calibrate", file, "--measure", "--output", out, "--overwrite") == 0
    both = load_prices(str(out))
    assert (both.dense_tflops, both.nic_gb_per_s) == (pytest.approx(2.0), pytest.approx(50.0))
    assert both.source.startswith("fitted to links.json; the rest from equilibra doctor on ")
    assert run("calibrate") == 2
    assert "--measure" in capsys.readouterr().err


def test_calibrate_refuses(tmp_path, capsys):
    bad = {
        "none": [], "text": "none", "negative": [{"kind": "dense", "flop": 1e9, "us": -1}],
        "unknown": [{"kind": "magic", "us": 1}], "few": [m for m in measured_h200() if m["kind"] == "experts"][:1],
    }  # fmt: skip
    for name, entries in bad.items():
        assert run("calibrate", measurements(tmp_path / f"{name}.json", entries)) == 2, name
        assert capsys.readouterr().err.count("\n") == 1, name
    assert run("calibrate", tmp_path / "missing.json") == 2
    assert run("calibrate", measurements(tmp_path / "ok.json", measured_h200()), "--base", "tpu") == 2
    simulated = make_run(TINY, ("static",))
    save_run(simulated, tmp_path / "run")
    for number, cluster in enumerate(({"num_nodes": 0, "ranks_per_node": 8}, {"num_nodes": "1"}, 3, {})):
        about = {"kind": "measured", "model": asdict(model_named("olmoe")), "cluster": cluster}
        save_run(Run(about=about, planners=simulated.planners), tmp_path / f"run{number}")
        assert run("calibrate", tmp_path / f"run{number}") == 2, cluster
        assert capsys.readouterr().err.startswith("equilibra: ")
    assert run("calibrate", tmp_path / "run") == 2
    assert "only measured runs can be fitted" in capsys.readouterr().err


def test_progress_is_silent_below_a_second(capsys, monkeypatch):
    clock = iter([0.0, 0.5, 0.9, 1.5, 2.5])
    monkeypatch.setattr(arguments, "monotonic", lambda: next(clock))
    shown = arguments.Progress()
    shown.step("static", 0, 2)
    shown.step("lpt", 1, 2)
    assert capsys.readouterr().err == ""
    shown.step("equilibra", 1, 2)
    assert capsys.readouterr().err == "[1/2] equilibra (2 s)\n"
    shown.close()
    assert capsys.readouterr().err == ""


SLOW_STEPS = """
from equilibra.cli.arguments import Progress
shown = Progress(quiet_s=0.0)
shown.step("static", 0, 4)
shown.step("equilibra", 3, 4)
shown.close()
"""


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", SLOW_STEPS], stderr=theirs, stdout=subprocess.PIPE, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.stdout == b""
    assert "█" * 18 + "░" * 6 + " 3/4 equilibra" in shown
    assert shown.endswith("\r\x1b[K")  # the bar is taken away
    assert "\n" not in shown
    plain = subprocess.run([sys.executable, "-c", SLOW_STEPS], capture_output=True, text=True, check=True)
    assert plain.stderr == "[0/4] static (0 s)\n[3/4] equilibra (0 s)\n"


@pytest.mark.slow
def test_a_large_step_takes_a_minute_and_two_gigabytes(tmp_path):
    """94 layers, 32 micro-batches, 64 ranks, seven planners, with run and report. Seen: 47 s, 1.8 GB on two cores."""
    begin = time.monotonic()
    words = ["simulate", "--model", "qwen3-235b-a22b", "--nodes", 8, "--ranks-per-node", 8, "--prompts", 190]
    words += [
        "--tokens-per-microbatch",
        262_144,
        "--output",
        tmp_path / "run",
        "--report",
        tmp_path / "r.html",
        "--json",
    ]
    command = [sys.executable, "-m", "equilibra", *map(str, words)]
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen(command, stdout=said)
        _, status, used = os.wait4(child.pid, 0)  # of this child alone: other tests have had larger ones
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    seconds, peak = time.monotonic() - begin, used.ru_maxrss * 1024
    planners = json.loads((tmp_path / "said").read_text())["planners"]
    assert list(planners) == DEFAULT
    assert planners["static"]["micro_batches"] >= 32
    assert peak < 2.2e9
    assert seconds < 180  # a busy machine, and kernels that are compiled first
