"""`equilibra train`: what it prints, its exit codes, and what is in the folder afterwards. Workers are stand-ins."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equilibra.cli import train
from equilibra.cli.main import main
from equilibra.train.config_files import load_config

REPOSITORY = Path(__file__).resolve().parents[3]
PLAIN = ("run.steps=4", "cluster.nodes=1", "cluster.ranks_per_node=2")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "WORKER", "tests.unit.train.stand_in:trains")
    monkeypatch.delenv("RANK", raising=False)


def run(*words: object) -> int:
    try:
        return main(["train", *(str(word) for word in words)])
    except SystemExit as error:
        return int(error.code)


def test_help_is_short_and_instant(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 26
    for word in (
        "--config",
        "--output",
        "--resume",
        "--planner",
        "--seed",
        "--steps",
        "--plain",
        "--json",
        "--options",
    ):
        assert word in text
    began = time.perf_counter()
    code = (
        "import sys; from equilibra.cli.main import main\ntry: main(['train', '--options'])\nexcept SystemExit: pass\n"
    )
    code += "sys.exit(any(name in sys.modules for name in ('numpy', 'numba', 'torch', 'rich')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[rollout]" in done.stdout
    assert time.perf_counter() - began < 5


def test_a_run_prints_lines_and_a_table(capsys, tmp_path):
    assert run(*PLAIN, "--output", "out") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("starting out: 2 ranks (1 nodes x 2), planner equilibra\nstart (loads")
    assert "step   4/4  reward 0.300" in printed
    assert "held-out reward          0.100     0.300" in printed
    assert printed.endswith("run: out\n")
    folder = tmp_path / "out"
    assert load_config(folder / "config.toml").run.steps == 4
    for name in ("metrics.jsonl", "log.txt", "tensorboard", "checkpoints", "output"):
        assert (folder / name).exists()


def test_json_is_alone_on_stdout(capsys):
    assert run(*PLAIN, "--json", "--output", "out", "--planner", "static", "--seed", 3, "--plain") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["steps"] == found["steps_asked"] == 4
    assert found["stopped"] is False
    assert found["metrics"]["reward"] == pytest.approx(0.3)
    assert (found["reward_held_out_first"], found["reward_held_out_last"]) == pytest.approx((0.1, 0.3))
    assert found["report"] is None
    assert found["folder"] == "out"
    assert "step   4/4" in printed.err
    config = load_config("out/config.toml")
    assert (config.balance.planner, config.run.seed) == ("static", 3)


def test_words_may_stand_anywhere_and_files_come_first(tmp_path, capsys):
    (tmp_path / "my.toml").write_text("[run]\nsteps = 9\nkeep = 5\n[cluster]\nnodes = 1\nranks_per_node = 1\n")
    assert run("--config", "my.toml", "run.steps=1", "--plain", "run.seed=4", "--output", "out", "task.path=p") == 0
    config = load_config("out/config.toml")
    assert (config.run.steps, config.run.keep, config.run.seed) == (1, 5, 4)
    assert config.task.path == str(tmp_path / "p")
    capsys.readouterr()


def test_the_default_folder_is_new_every_time(tmp_path, capsys):
    for _ in range(2):
        assert run("run.steps=1", "cluster.nodes=1", "cluster.ranks_per_node=1") == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2
    capsys.readouterr()


def test_a_run_is_resumed_with_more_steps(capsys):
    assert run(*PLAIN, "--output", "out") == 0
    assert run("--resume", "out", "--steps", 6, "balance.spare_slots=0") == 0
    printed = capsys.readouterr().out
    assert "continuing out: " in printed
    assert "going on from step 4" in printed
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1, 2, 3, 4, 5]
    config = load_config("out/config.toml")
    assert (config.run.steps, config.balance.spare_slots, config.cluster.nodes) == (6, 0, 1)


def test_a_run_without_a_checkpoint_is_resumed_from_its_beginning(capsys):
    assert run(*PLAIN, "--output", "out") == 0
    for checkpoint in Path("out/checkpoints/policy").iterdir():
        checkpoint.rmdir()
    assert run("--resume", "out") == 0
    assert "starting out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.stesp=3"], "unknown option run.stesp; did you mean run.steps?"),
        (["--planner", "equilbra"], "no planner is named 'equilbra'"),
        (["run.steps=3", "--steps", "4"], "run.steps is given twice"),
        (["--seed", "x"], "run.seed must be a whole number from 0"),
        (["--config", "none.toml"], "cannot read none.toml: No such file"),
        (["--config", "."], "it is a folder"),
        (["--resume", "none"], "cannot resume none: not a folder of equilibra train"),
        (["--resume", "a", "--output", "b"], "remove --config and --output"),
        (["--output", "file"], "cannot write file: it is a file"),
        (["--output", "file/run"], "cannot write file/run: Not a directory"),
        (["cluster.nodes=1000"], "2000 processes"),
    ],
)
def test_bad_input_is_one_line_and_no_folder(words, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(*words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("equilibra: ")
    assert said in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_unknown_flags_are_errors(capsys):
    assert run("--stesp", "3") == 2
    assert run("run.steps=3", "--plain", "word") == 2
    assert "unrecognized arguments: word" in capsys.readouterr().err


def test_a_run_is_not_overwritten_and_not_resumed_as_another(capsys):
    assert run(*PLAIN, "--output", "out") == 0
    capsys.readouterr()
    assert run(*PLAIN, "--output", "out") == 2
    assert "it holds a run; continue it with equilibra train --resume out" in capsys.readouterr().err
    assert run("--resume", "out", "--seed", 1) == 2
    assert "cannot resume with run.seed = 1: the run has 0" in capsys.readouterr().err


def test_bad_input_that_a_rank_finds_leaves_no_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train, "WORKER", "tests.unit.train.stand_in:bad_input")
    assert run(*PLAIN, "--output", "out") == 2
    assert capsys.readouterr().err == "equilibra: task.name: no such task\n"
    assert not (tmp_path / "out").exists()


def test_a_failed_rank_is_one_line_and_in_the_log(monkeypatch, capsys):
    monkeypatch.setattr(train, "WORKER", "tests.unit.train.stand_in:one_is_killed")
    assert run(*PLAIN, "--output", "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("equilibra: ExecuteError: rank 1 of 2 was killed by SIGKILL")
    assert "equilibra train --resume out" in line
    assert "killed by SIGKILL" in Path("out/log.txt").read_text()


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(train, "NEEDED", ("torch", "not_there"))
    assert run() == 2
    assert "needs not_there: pip install 'equilibra[train]'" in capsys.readouterr().err


def test_the_report_is_written_where_there_is_a_step(monkeypatch, capsys, tmp_path):
    assert train.finish(tmp_path) is None
    monkeypatch.setattr(train, "finish", lambda folder: folder / "report.html")
    assert run(*PLAIN, "--output", "out") == 0
    assert capsys.readouterr().out.endswith("report: out/report.html\n")
    (tmp_path / "out" / "step.run").mkdir()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "WORKER", "tests.unit.train.stand_in:trains")
    assert run("--resume", "out", "--json") == 0
    printed = capsys.readouterr()
    assert "note: no report: out/step.run is not a run folder" in printed.err
    assert json.loads(printed.out)["report"] is None


def test_under_torchrun_the_folder_must_be_named(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(*PLAIN) == 2
    assert "under torchrun every rank must know the run folder: give --output DIR" in capsys.readouterr().err
    Path("out").mkdir()
    assert run(*PLAIN, "--output", "out") == 0
    assert capsys.readouterr().out == ""  # rank 0 talks


def test_torchrun_starts_a_run_again(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(*PLAIN, "--output", "out") == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(*PLAIN, "--output", "out") == 0
    assert "continuing out" in capsys.readouterr().out


MAIN = """
import sys
from equilibra.cli import train
from equilibra.cli.main import main
train.WORKER = "tests.unit.train.stand_in:trains"
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_ctrl_c_of_a_whole_terminal_ends_with_a_checkpoint(tmp_path):
    """As a terminal does it: every process of the group gets the signal."""
    words = ["--output", "out", "run.steps=1000", "task.options.sleep_s=0.05"]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 30
    while not (tmp_path / "out" / "metrics.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(process.pid, 2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "stopping: " in out
    assert "held-out reward" in out
    assert "of 1000 steps; continue with: equilibra train --resume out" in err
    assert "Traceback" not in err
    assert list((tmp_path / "out" / "checkpoints" / "policy").iterdir())


def test_the_live_view_is_drawn_on_a_terminal(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    words = ["--output", "out", "run.steps=4", "task.options.sleep_s=0.2", "cluster.nodes=1"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], env=environment, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        text += part
        if not part:
            break
    os.close(ours)
    err = process.communicate()[1]
    assert process.returncode == 0, err
    shown = text.decode(errors="replace")
    assert "equilibra train · out" in shown
    assert "rollout" in shown
    assert "step 4 of 4" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    assert "held-out reward" in shown
