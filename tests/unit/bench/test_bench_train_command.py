"""`equilibra bench train`: what it prints and writes, and its exit codes."""

import json
import subprocess
import sys

import pytest
from tests.distributed.ranks import start_server

from benchmarks.train import figures
from equilibra.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")
CONTENDERS = {"static", "equilibra", "equilibra-moves", "balanced"}
STAGES = {"rollout", "reward", "plan", "move", "logprob", "advantages", "update", "weights"}
SPREADS = {
    "static_imbalance",
    "imbalance",
    "planning_and_moving_share",
    "exposed_share",
    "prepared_share",
    "from_contiguous_share",
}


def run(*words: object) -> int:
    try:
        return main(["bench", "train", *(str(word) for word in words)])
    except SystemExit as error:
        return int(error.code)


def test_json_has_the_figures_with_their_spreads_and_files_are_written(tmp_path, capsys):
    start_server()
    assert run("--quick", "--json", "--skew", "1.5", "--output", tmp_path) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)  # nothing else on stdout
    for found in (result, result["moves_only"]):
        for name in SPREADS:
            assert found[name]["low"] <= found[name]["median"] <= found[name]["high"], name
        for name in ("speedup_over_static", "share_of_balanced"):
            assert set(found[name]) == {"step", "logprob_and_update"}
            assert all(len(spread["repeats"]) == 2 for spread in found[name].values())
    assert set(result["shares"]) == CONTENDERS
    for shares in result["shares"].values():
        assert set(shares) == STAGES
        assert sum(shares[stage]["repeats"][0] for stage in shares) == pytest.approx(1.0)
        assert all(shares[stage]["low"] > 0 for stage in STAGES - {"move"})
    assert result["static_imbalance"]["median"] > 1.3
    assert result["imbalance"]["median"] <= result["static_imbalance"]["median"]
    assert result["settings"]["skew"] == 1.5
    assert result["first_round"]["largest_difference"] < 1e-3
    balanced = [repeat["contenders"]["balanced"] for repeat in result["repeats"]]
    assert all(one["imbalance"] == pytest.approx(1.0) for one in balanced)
    assert result["command"] == "equilibra bench train --skew 1.5 --quick"
    assert {"cpu", "cores", "commit", "torch", "load_average"} <= set(result["environment"])
    assert "repeat 2 of 2" in printed.err
    page = (tmp_path / "train.md").read_text()
    assert all(word in page for word in (*CONTENDERS, *STAGES, "measured", "--skew 1.5", "from contiguous homes"))
    assert set(json.loads((tmp_path / "train.json").read_text())["sections"]) == {"figures", "stages", "begin"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "above 0"),
        (["--skew", "-1"], "from 0 on"),
        (["--skew", "nan"], "from 0 on"),
        (["--path", "pigeon"], "invalid choice"),
        (["--hidden", "100"], "multiple of 64"),
        (["--experts", "7"], "7"),
        (["--answers", "1"], "use 2 answers or more"),
        (["--answer-tokens", "4000"], "--tokens-per-rank 1024 cannot hold"),
        (["--output", "missing"], "create it first"),
    ],
)
def test_what_cannot_be_run_is_exit_code_2_and_one_clear_line(words, message, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_another_file_of_that_name_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "train.json").write_text("mine")
    assert run("--quick", "--output", tmp_path) == 2
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "train.json").read_text() == "mine"


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(figures, "find_spec", lambda name: None if name == "transformers" else object())
    assert run("--quick") == 2
    assert "needs transformers: pip install 'equilibra[train]'" in capsys.readouterr().err


def test_the_command_itself_needs_no_torch():
    code = "import sys; import benchmarks.train.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
