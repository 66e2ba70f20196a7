"""`equilibra verify` finds nothing but rounding, and finds what a lost gradient changes."""

import json

import pytest

from equilibra.cli import train
from equilibra.cli.main import main

SMALL = ["cluster.nodes=1", "cluster.ranks_per_node=2", "rollout.prompts=4", "rollout.answers=2", "run.dtype=float32"]


@pytest.mark.arithmetic
def test_a_run_differs_by_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert found["imbalance"] < found["imbalance_static"]
    gradients = {one["what"]: one for one in found["differences"]}
    assert set(gradients) == {
        "log-probabilities, mean", "gradients of experts", "gradients of routers", "gradients of other weights",
    }  # fmt: skip
    for one in found["differences"][1:]:
        assert 0 < one["found"] <= one["allowed"] < 1e-5


def test_lost_gradients_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "VERIFIER", "tests.unit.train.stand_in:loses_gradients_of_copies")
    assert main(["verify", *SMALL]) == 1
    said = capsys.readouterr()
    (row,) = [line for line in said.out.splitlines() if "MORE THAN ROUNDING" in line]
    assert row.startswith("gradients of experts")
    assert "balancing changes this run's numbers by more than rounding" in said.err


def test_options_are_those_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "run.dtype=float3"]) == 2
    assert "run.dtype must be one of" in capsys.readouterr().err


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None if name == "transformers" else name)
    assert main(["verify", *SMALL]) == 2
    assert "equilibra verify needs transformers: pip install 'equilibra[train]'" in capsys.readouterr().err
