"""`equilibra doctor` as it is used."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equilibra.cli.main import main
from equilibra.cost.presets import load_prices
from equilibra.doctor import node
from equilibra.doctor.finding import Ask, Examination, Finding, Measured, PathState, State, Verdict
from equilibra.doctor.node import CHECKS

DOCTOR = [sys.executable, "-m", "equilibra", "doctor"]


def run(*words: str) -> int:
    try:
        return main(["doctor", *(str(word) for word in words)])
    except SystemExit as error:
        return int(error.code)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The command itself, on this machine."""
    path = tmp_path_factory.mktemp("doctor") / "here.toml"
    words = [*DOCTOR, "--json", "--write", str(path), "--model", "olmoe"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return done, path


def test_this_machine_can_do_something(real):
    done, _ = real
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["command"].startswith("equilibra doctor --json")
    found = {one["name"]: one for one in answer["findings"]}
    assert found["python"]["state"] == found["gloo"]["state"] == "ok"
    assert set(CHECKS) - {"gpu"} <= set(found)
    assert {one["state"] for one in answer["findings"]} <= {str(state) for state in State}
    assert "olmoe, " in found["shared memory"]["text"]
    paths = {one["path"]: one["state"] for one in answer["paths"]}
    assert paths["collective"] == "will-work"
    assert set(paths) == {"collective", "host", "ipc", "both"}
    if "gpu 0" not in found:
        assert paths["ipc"] == paths["both"] == "will-not-work"
        assert found["cuda ipc"]["state"] == found["nvlink"]["state"] == "not-tested"


def test_what_it_writes_is_hardware_for_the_simulator(real):
    done, path = real
    hardware = load_prices(str(path))
    assert hardware.name == "here"
    assert "equilibra doctor on" in hardware.source
    assert "dense_tflops" in hardware.source.partition("experts and attention")[0]
    cases = [case for one in json.loads(done.stdout)["measured"] for case in one["cases"] if case["kind"] == "dense"]
    seen = [case["flop"] / case["us"] * 1e-6 for case in cases]
    assert 0.99 * min(seen) <= hardware.dense_tflops <= 1.11 * max(seen)
    assert "equilibra simulate --hardware" in done.stderr


@pytest.fixture
def examined(monkeypatch):
    """An examination with a made-up outcome; its arguments are kept."""
    asked: list[tuple[Ask, bool]] = []

    def install(state: PathState):
        cases = [{"kind": "dense", "flop": f, "us": f / 1e6, "us_low": 1.0, "us_high": 1.0} for f in (10**7, 10**8)]
        rate = Measured(name="products", value=1.0, unit="TFLOP/s", low=0.9, high=1.1, repeats=5, cases=cases)
        found = Examination(
            findings=[Finding(name="gloo", state=State.MISSING, text="gone", advice="bring it back")],
            measured=[rate],
            verdicts=[Verdict(path="collective", state=state, text="because")],
        )

        def examine(ask, *, measure, tell):
            asked.append((ask, measure))
            return found

        monkeypatch.setattr(node, "examine", examine)
        return asked

    return install


@pytest.mark.parametrize(
    ("state", "code"), [(PathState.WORKS, 0), (PathState.FAILS, 1), (PathState.NOT_TESTED, 1)], ids=str
)
def test_exit_codes(examined, capsys, state, code):
    examined(state)
    assert run() == code
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1].startswith("transfer paths: collective")
    assert "→ bring it back" in out


def test_columns_are_aligned(examined, capsys):
    examined(PathState.WORKS)
    run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].index("state") == lines[1].index("missing")
    assert lines[0].index("found") == lines[1].index("gone") == lines[2].index("→")


def test_options_arrive(examined, capsys):
    asked = examined(PathState.WORKS)
    assert run("--model", "olmoe", "--spare-slots", "3", "--ranks-per-node", "4", "--no-measure") == 0
    assert asked == [(Ask(model="olmoe", spare_slots=3, ranks_per_node=4), False)]


def test_a_file_is_replaced_only_by_force(examined, capsys, tmp_path):
    asked, path = examined(PathState.WORKS), tmp_path / "mine.toml"
    path.write_text("kept")
    assert run("--write", path) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "kept"
    assert asked == []  # refused before the work
    assert run("--write", path, "--force") == 0
    assert load_prices(str(path)).name == "mine"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--write", "mine.json"], "end in .toml"),
        (["--write", "no/such/mine.toml"], "does not exist"),
        (["--write", "mine.toml", "--no-measure"], "leave out --no-measure"),
        (["--force"], "goes with --write"),
        (["--model", "gpt-9"], "gpt-9"),
        (["--spare-slots", "0"], "whole number above 0"),
    ],
)
def test_bad_input(examined, capsys, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    asked = examined(PathState.WORKS)
    assert run(*words) == 2
    assert said in capsys.readouterr().err
    assert asked == []


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    doctor = subprocess.Popen(
        [*DOCTOR, "--write", str(tmp_path / "mine.toml")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        children = Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children")
        for _ in range(500):
            if started := children.read_text().split():
                break
            time.sleep(0.02)
        doctor.send_signal(signal.SIGINT)
        _, err = doctor.communicate(timeout=60)
    finally:
        doctor.kill()
    assert doctor.returncode == 130
    assert err.strip().splitlines()[-1] == "equilibra: interrupted"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    end = time.monotonic() + 30  # one that was only just started reads that nobody asks it anything, and ends
    while any(map(_runs, started)) and time.monotonic() < end:
        time.sleep(0.05)
    assert started
    assert not any(map(_runs, started))


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
