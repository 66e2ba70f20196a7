"""examples/equilibra_in_one_file.py: small, alone, right, and about as good as the real planner.

`test_examples.py` runs it with its defaults; its exit code says whether loss and gradients are unchanged.
"""

import ast
import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from tests.conftest import REPOSITORY

from equilibra import Cluster, StepLoad
from equilibra.plan.entry import plan_step

FILE = REPOSITORY / "examples" / "equilibra_in_one_file.py"
DOCUMENT = REPOSITORY / "docs" / "idea.md"


@pytest.fixture(scope="module")
def one():
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*words):
    return subprocess.run(
        [sys.executable, str(FILE), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_it_is_one_short_file_of_numpy_and_torch():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 400
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.split(".")[0] for name in names}
    assert {"numpy", "torch"} <= tops
    assert tops <= sys.stdlib_module_names | {"numpy", "torch"}


def test_a_recording_is_balanced_and_computes_the_same(tmp_path):
    generator = np.random.default_rng(3)
    offsets = np.array([0, 90, 170, 180, 300, 390, 480])  # six cells for eight: the last ranks have no tokens
    ids = np.minimum(generator.geometric(0.2, (480, 3, 2)) - 1, 14).astype(np.uint8)
    np.savez(tmp_path / "routing.npz", ids=ids, offsets=offsets, num_experts=16)
    done = run("--recording", tmp_path / "routing.npz", "--layer", 2, "--tokens-per-rank", 100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "480 tokens in 2 micro-batches, 16 experts" in done.stdout
    static, flash, both = map(float, re.findall(r"^(?:static|flash|and)\D*([\d.]+)", done.stdout, re.MULTILINE))
    assert static > flash > both >= 1.0
    assert both < 1.02
    assert "unchanged" in done.stdout


@pytest.mark.parametrize("nodes", [1, 2], ids=["of-a-flash-copy", "of-a-standing-copy"])
def test_a_lost_gradient_fails(nodes):
    done = run("--nodes", nodes, "--drop-a-gradient")
    assert done.returncode == 1, done.stdout + done.stderr
    difference = dict(re.findall(r"(loss|input|router|experts) ([\d.]+e[-+]\d+)", done.stdout))
    assert float(difference["experts"]) > 1e-6
    assert max(float(difference[name]) for name in ("loss", "input", "router")) < 1e-10
    assert "FAILED" in done.stdout
    table = done.stdout.partition("\n\n")[0]
    assert (table in DOCUMENT.read_text()) == (nodes == 2)


@pytest.mark.parametrize(("num_nodes", "group"), [(1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("slots", [(0, 0), (1, 1), (2, 2)])
def test_plans_keep_their_promises(one, num_nodes, group, slots):
    flash_slots, standing_slots = slots
    for seed in range(6):
        generator = np.random.default_rng(seed)
        popularity = generator.dirichlet(np.full(16, 0.3), size=(5, num_nodes * group))
        tokens_MER = generator.multinomial(300, popularity).transpose(0, 2, 1)
        plan = one.plan_step(tokens_MER, num_nodes, flash_slots, standing_slots)
        held = {(expert, int(home)) for expert, home in enumerate(plan.home_of_expert)}
        for expert, source, target in plan.standing:
            assert source == plan.home_of_expert[expert]
            assert source // group != target // group
        held |= {(route.expert, route.target) for route in plan.standing}
        assert max(np.bincount([route.target // group for route in plan.standing], minlength=1)) <= standing_slots
        for tokens_ER, visit in zip(tokens_MER, plan.visits, strict=True):
            served_ER = np.zeros_like(tokens_ER)
            np.add.at(served_ER, visit.expert_of_instance, visit.tokens_IR)
            assert (served_ER == tokens_ER).all()  # every pair once
            for expert, source, target in visit.flash:
                assert (expert, source) in held
                assert source // group == target // group
            flash = {(route.expert, route.target) for route in visit.flash}
            assert len(flash) == len(visit.flash)
            assert not flash & held
            assert set(zip(visit.expert_of_instance, visit.rank_of_instance, strict=True)) <= flash | held
            assert max(np.bincount([rank for _, rank in flash], minlength=1)) <= flash_slots


def test_own_tokens_first(one):
    tokens_ER = np.array([[0, 2, 4, 0]])
    quota_ER = np.array([[2, 1, 3, 0]])
    assert one.split(tokens_ER, quota_ER, 2).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 3, 0]]


def test_a_third_rank_helps_when_slots_run_out(one):
    """One receiver with one slot, taken by expert 0: the excess of rank 1 gets there through rank 0."""
    quota_ER = np.diag([120, 110, 100, 70])
    held_ER = quota_ER > 0
    levelled_ER = one.add_flash_copies(quota_ER, held_ER, 1)
    assert levelled_ER.tolist() == [[90, 0, 0, 30], [10, 100, 0, 0], [0, 0, 100, 0], [0, 0, 0, 70]]


def test_the_worked_example(one):
    """The one of docs/idea.md."""
    tokens_ER = np.repeat([[15], [5], [2], [3]], 4, axis=1)
    plan = one.plan_step(tokens_ER[None], 2, 2, 2)
    (visit,) = plan.visits
    assert one.imbalance(one.plan_step(tokens_ER[None], 2, 0, 0)) == 2.4
    assert one.imbalance(plan) == 1.0
    assert plan.standing == [(0, 0, 2)]
    assert visit.flash == [(0, 0, 1), (0, 2, 3)]
    assert visit.tokens_IR.sum(1).tolist() == [25, 5, 17, 13, 20, 8, 12]
    assert visit.tokens_IR[:4].tolist() == [[15, 10, 0, 0], [0, 5, 0, 0], [0, 0, 15, 2], [0, 0, 0, 13]]


SIZES = [("gpt-oss-20b", 512), ("gpt-oss-20b", 2048), ("dsv2-lite-law", 600), ("dsv2-lite-intent", 128)]


@pytest.mark.parametrize(("num_nodes", "group"), [(1, 4), (2, 2), (1, 8)])
@pytest.mark.parametrize(("name", "tokens_per_rank"), SIZES)
def test_within_two_percent_of_the_real_planner(one, traces, name, tokens_per_rank, num_nodes, group):
    layers = range(0, 24, 4)
    read = [one.read_recording(traces / f"{name}.npz", layer) for layer in layers]
    _, offsets, num_experts = read[0]
    micro_batches = one.cut(offsets, num_nodes * group, tokens_per_rank)
    tokens_LMER = np.array([one.count(ids_TK, micro_batches, num_experts) for ids_TK, _, _ in read])
    load = StepLoad(tokens_MLER=np.ascontiguousarray(tokens_LMER.transpose(1, 0, 2, 3), np.int32))
    plan = plan_step(load, cluster=Cluster(num_nodes=num_nodes, ranks_per_node=group))
    rows_LMR = plan.rank_load(load)
    for tokens_MER, rows_MR in zip(tokens_LMER, rows_LMR, strict=True):
        real = rows_MR.max(1).sum() / rows_MR.mean(1).sum()
        assert one.imbalance(one.plan_step(tokens_MER, num_nodes, 2, 2)) <= 1.02 * real
        assert one.imbalance(one.plan_step(tokens_MER, num_nodes, 0, 0)) > 1.02 * real  # so the rule is needed
