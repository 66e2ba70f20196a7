"""`equilibra rollout plan`: a table, one JSON object, a page, and errors of one line."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from equilibra.cli.main import main
from equilibra.cost.decode import decode_law
from equilibra.cost.presets import prices_named

ASKED = ("rollout", "plan", "--model", "mixtral-8x22b", "--latency-ms", "100")


def run(*words) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return int(error.code)


def said(capsys, *words):
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_promised_keys(capsys):
    found = said(capsys, *ASKED, "--context", 4096)
    assert found["kind"] == "simulated"
    assert found["hardware"] == {"attention": "h200", "experts": "h200"}
    assert found["objective"] == "gpu"
    assert found["verdict"] in ("wins", "level", "dead zone")
    plan = found["disaggregated"]
    for key in ("attention_nodes", "attention_tensor", "expert_nodes", "expert_tensor", "micro_batches", "batch",
                "ranks", "t_a_us", "t_e_us", "t_c_us", "latency_us", "tokens_per_s",
                "tokens_per_s_and_rank"):  # fmt: skip
        assert plan[key] > 0, key
    assert plan["latency_us"] <= 100e3
    assert plan["ranks"] <= 64
    assert found["search_s"] < 1
    assert found["conditions"].keys() == {"balanced", "transfer_hidden", "enough_micro_batches", "all_hold"}


def test_the_table_says_what_the_json_says(capsys):
    found = said(capsys, *ASKED, "--context", 4096)
    assert run(*ASKED, "--context", 4096) == 0
    out = capsys.readouterr().out
    assert found["sentence"] in out
    assert "Simulated." in out
    assert f"{found['disaggregated']['tokens_per_s']:,.0f}" in out
    assert max(len(line) for line in out.splitlines()) <= 125


def test_different_hardware_optimises_cost(capsys):
    found = said(capsys, *ASKED, "--context", 700, "--attention-hardware", "h20", "--expert-hardware", "l40s")
    assert found["objective"] == "cost"
    assert found["cost_per_hour"] == {"attention": 1.85, "experts": 1.08}
    dearer = said(capsys, *ASKED, "--context", 700, "--attention-hardware", "h20", "--expert-hardware", "l40s",
                  "--expert-cost", 10)  # fmt: skip
    assert dearer["ratio"]["cost"] < found["ratio"]["cost"]
    per_gpu = said(capsys, *ASKED, "--context", 700, "--attention-hardware", "h20", "--expert-hardware", "h200",
                   "--objective", "gpu")  # fmt: skip
    assert set(per_gpu["ratio"]) == {"gpu"}  # an H200 has no known cost


def test_lengths_as_a_distribution(capsys, tmp_path):
    even = said(capsys, *ASKED, "--context", 2000)
    tail = said(capsys, *ASKED, "--answer-median", 2000, "--answer-sigma", 1, "--answer-limit", 30000, "--prompt", 300)
    assert tail["context"]["mean"] > 2000
    assert tail["context"]["longest"] == pytest.approx(30300)
    assert tail["longest_answer_s"] == pytest.approx(30000 * tail["disaggregated"]["latency_us"] * 1e-6)
    assert "answers_per_s" not in even
    (tmp_path / "lengths.json").write_text(json.dumps([100, 5000]))
    listed = said(capsys, *ASKED, "--lengths", tmp_path / "lengths.json")
    assert listed["context"]["mean_answer"] == 2550
    prompted = said(capsys, *ASKED, "--lengths", tmp_path / "lengths.json", "--prompt", 700)
    assert prompted["context"]["longest"] == 5700
    ids = np.zeros((60, 2, 2), np.uint8)
    ids[..., 1] = 1
    np.savez(tmp_path / "trace.npz", ids=ids, offsets=np.array([0, 10, 60]), num_experts=4)
    recorded = said(capsys, *ASKED, "--lengths", tmp_path / "trace.npz")
    assert recorded["context"]["longest_answer"] == 50


def test_the_page_is_written(capsys, tmp_path):
    page = tmp_path / "d.html"
    assert run(*ASKED, "--context", 4096, "--report", page) == 0
    assert page.read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert run(*ASKED, "--context", 4096, "--report", page) == 2
    assert "it exists" in capsys.readouterr().err


def test_a_law_of_ones_own(capsys, tmp_path):
    law = asdict(decode_law(prices_named("h200")))
    (tmp_path / "law.json").write_text(json.dumps({"law": {**law, "source": "mine", "attention_fixed_us": 500.0}}))
    slower = said(capsys, *ASKED, "--context", 4096, "--law", tmp_path / "law.json")
    assert slower["law"] == "mine"
    assert slower["disaggregated"]["t_a_us"] > 500


@pytest.mark.parametrize(("words", "message"), [
    (("--model", "gpt-5", "--context", 10), "no model is named 'gpt-5'"),
    (("--context", 10, "--attention-hardware", "h9"), "no hardware is named 'h9'"),
    (("--context", 10, "--expert-hardware", "b20"), "no hardware is named 'b20'"),
    (("--latency-ms", 1, "--context", 10), "latency 1 ms is out of reach"),
    (("--latency-ms", -1, "--context", 10), "latency must be"),
    (("--latency-ms", "nan", "--context", 10), "latency must be"),
    (("--context", 10**9), "context must be"),
    (("--context", 10**8), "the cache of one sequence of 100000000 tokens"),
    (("--gpus", 2, "--context", 10), "does not fit disaggregated on 2 ranks"),
    (("--model", "qwen3-next", "--context", 10), "linear"),
    ((), "one of --context, --answer-median and --lengths"),
    (("--context", 10, "--answer-median", 10), "one of --context"),
    (("--context", 10, "--prompt", 10), "--prompt and --context do not go together"),
    (("--lengths", "none.json", "--answer-limit", 9), "--answer-limit and --lengths do not go together"),
    (("--lengths", "none.json"), "cannot read none.json"),
    (("--answer-median", 10, "--answer-sigma", 9), "sigma must be"),
    (("--context", 10, "--objective", "cost"), "no known cost per hour: give --attention-cost"),
    (("--context", 10, "--attention-cost", -3), "cost per hour must be"),
    (("--context", 10, "--law", "none.json"), "cannot read none.json"),
    (("--context", 10, "--imbalance", 0.5), "imbalance must be"),
    (("--context", 10, "--gpus", 10**7), "ranks must be"),
    (("--context", 10, "--report", "no/such/folder.html"), "does not exist"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(capsys, words, message):
    assert run(*ASKED, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("equilibra: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("words", [("rollout",), ("rollout", "plan"), ("rollout", "fly"), (*ASKED, "--gpus", "0")])
def test_usage(capsys, words):
    assert run(*words) == 2
    assert "usage:" in capsys.readouterr().err
