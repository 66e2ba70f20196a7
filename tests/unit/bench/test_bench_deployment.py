"""The bench of deployments and the probe of decoding run, and their files hold what they promise."""

import json
import sys

import pytest
import torch

from benchmarks import deployment
from benchmarks.probes import measure_decode
from equilibra.core.model import model_named
from equilibra.cost.decode import load_law


@pytest.fixture
def one_thread():
    """Threads of a busy machine wait for each other for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_bench_writes_every_section(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["deployment", "--quick", "--output", str(tmp_path)])
    deployment.main()
    sections = json.loads((tmp_path / "deployment.json").read_text())["sections"]
    assert list(sections) == ["paper", "zones", "exact", "growth"]
    assert all(row["worst_below_brute_force"] <= 0.02 for row in sections["exact"]["rows"])
    assert all(row["search_s"] < 1 for row in sections["growth"]["rows"])
    assert {row["model"] for row in sections["paper"]["rows"]} == {"mixtral-8x22b", "dbrx", "scaled-moe-317b"}
    assert "simulated" in (tmp_path / "deployment.md").read_text()


def test_the_probe_measures_and_its_law_can_be_planned_with(tmp_path, monkeypatch, capsys, one_thread):
    measured, law = tmp_path / "measured.json", tmp_path / "law.json"
    monkeypatch.setattr(sys, "argv", ["probe", "--tiny", "--output", str(measured)])
    measure_decode.main()
    kinds = [case["kind"] for case in json.loads(measured.read_text())["cases"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"attention": 12, "experts": 12, "dense": 6}
    monkeypatch.setattr(sys, "argv", ["probe", "--fit", str(measured), "--output", str(law)])
    measure_decode.main()
    assert "attention, kept apart" in capsys.readouterr().out
    assert load_law(law).source.startswith("fitted to")


def test_the_probes_ways_of_attention_agree(one_thread):
    bench = measure_decode.Bench(device=torch.device("cpu"), dtype=torch.float32, repeats=3)
    model = measure_decode.small(model_named("gpt-oss-20b"))
    caches = torch.randn(2 * 3 * 2 * 8 * 16)
    half = caches.numel() // 2
    layer = measure_decode.Attention(
        model=model, batch=3, context=8, weights={}, key=caches[:half].view(3, 2, 8, 16),
        value=caches[half:].view(3, 2, 8, 16), hidden=bench.randn(3, 64), angles=bench.randn(2, 8),
    )  # fmt: skip
    query = torch.randn(3, 4, 16)
    flash, grouped, plain = (layer.scores(kind, query) for kind in ("flash", "grouped", "plain"))
    torch.testing.assert_close(flash, plain)
    torch.testing.assert_close(grouped, plain)
