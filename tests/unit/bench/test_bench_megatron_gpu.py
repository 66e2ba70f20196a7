"""Cases, routing and tables of the Megatron bench on a GPU; Megatron itself runs there, or tiny on CPUs."""

import copy
import json
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.megatron_gpu.__main__ import main
from benchmarks.megatron_gpu.cases import CASES, SHAPES, cases_named, cases_of
from benchmarks.megatron_gpu.figures import BALANCED, OURS, STATIC, keep, largest_difference, results_of, tables
from benchmarks.megatron_gpu.routing import LEAST, balanced_ids, rank_imbalance, skewed_ids

MADE = {"command": "benchmarks/megatron_gpu/run.sh", "date": "2026-11-18", "commit": "abc", "gpu": "H", "versions": "v"}


def step(seconds, slowest=100.0):
    return {
        "seconds": seconds, "plan_s": 0.002, "experts_slowest_ms": slowest, "experts_mean_ms": 80.0,
        "products_slowest_ms": slowest - 10, "products_mean_ms": 75.0, "exchange_ms": 20.0,
        "exchange_with_waiting_ms": 40.0,
    }  # fmt: skip


def measured(name="gpt-fused", ours=1.05):
    case = cases_named([name])[0]
    found = {
        "losses": {STATIC: [4.0, 3.0], OURS: [4.0, 3.003]},
        "static_imbalance": 1.5, "planned_imbalance": 1.004, "copies_of_step": 12.0,
        "resident_bytes": {STATIC: 2**30, OURS: 2**30}, "setting": {"spare_slots": "2"},
        "case": asdict(case), "shape": asdict(SHAPES[case.shape]),
    }  # fmt: skip
    if case.timed:
        found["steps"] = {
            STATIC: [step(1.4), step(1.5)],
            OURS: [step(ours), step(ours)],
            BALANCED: [step(1.0), step(1.0)],
        }
        found["transient_bytes"] = dict.fromkeys((STATIC, OURS, BALANCED), 2**20)
    if case.control:
        found["losses"]["control"] = [4.0, 3.1]
    return {**MADE, **found}


def test_a_case_is_read_off_its_row():
    text = tables({"gpt-fused": measured()})
    (row,) = [line for line in text.splitlines() if line.startswith("| gpt-fused | GPTModel, 2 layers, bfloat16")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == ["ipc", "collective", "1.50 → 1.004"]
    assert cells[5:] == ["1450 (1400 to 1500)", "1050 (1050 to 1050)", "1000 (1000 to 1000)", "1.38×", "95.2% ✓"]
    assert "`benchmarks/megatron_gpu/run.sh --case gpt-fused`" in text
    assert "| gpt-fused | Equilibra | 1050 | 100 (1.25) | 90 (1.20) | 20 (2%) | 2.0 |" in text


def test_below_the_goal_there_is_no_tick():
    assert "94.3% |" in tables({"gpt-fused": measured(ours=1.06)})


def test_losses_have_a_verdict():
    case = measured("check-float32")
    assert largest_difference(case) == pytest.approx(1e-3)
    assert "1.0e-03 ✗ | 3.3e-02 ✓" in tables({"check-float32": case})
    right, blind = copy.deepcopy(case), copy.deepcopy(case)
    right["losses"][OURS] = blind["losses"][OURS] = blind["losses"]["control"] = [4.0, 3.00001]
    assert "3.3e-06 ✓ | 3.3e-02 ✓" in tables({"check-float32": right})
    assert "3.3e-06 ✗ not noticed" in tables({"check-float32": blind})


def test_failed_cases_say_why():
    text = tables({"layer": {**MADE, "error": "ValueError: MegatronSetting has no path"}})
    assert "- layer: `ValueError: MegatronSetting has no path`" in text
    assert "## Steps" not in text


def test_results_of_several_calls_are_one_file(tmp_path, capsys):
    path = tmp_path / "megatron-gpu.json"
    keep(path, "gpt-fused", measured())
    keep(path, "check-float32", measured("check-float32"))
    keep(path, "gpt-fused", measured(ours=1.2))
    assert list(results_of(path)) == ["gpt-fused", "check-float32"]
    path.with_suffix(".md").unlink()
    assert main(["--table", str(path)]) == 0
    text = path.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert "83.3%" in text
    json.loads(path.read_text())


def test_cases_have_names_of_their_own_and_known_shapes():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.shape for case in CASES} <= set(SHAPES)
    assert [case.name for case in cases_named(["layer", "gpt"])] == ["layer", "gpt"]
    with pytest.raises(SystemExit, match="no case is named 'x'"):
        cases_named(["x"])


def test_cpus_have_no_links_through_gpu_memory():
    assert {case.links for case in cases_of(list(CASES), tiny=True, device="cpu", links=None)} == {"nccl"}
    assert {case.links for case in cases_of(list(CASES), tiny=False, device="cuda", links=None)} == {"ipc", "nccl"}


def test_skewed_routing_is_skewed_and_balanced_routing_is_not():
    shape = SHAPES["tiny"]
    skewed = skewed_ids(shape, steps=2, num_ranks=4)
    balanced = balanced_ids(shape, steps=2, num_ranks=4)
    assert skewed.shape == balanced.shape == (2, 4, 4, 32, 2, 2)
    assert rank_imbalance(skewed, shape.num_experts) >= LEAST
    assert rank_imbalance(balanced, shape.num_experts) == 1.0
    for ids in (skewed, balanced):
        assert (np.sort(ids, axis=-1)[..., 1:] != np.sort(ids, axis=-1)[..., :-1]).all()
    assert (skewed == skewed_ids(shape, steps=2, num_ranks=4)).all()
