"""verl's whole trainer under Ray, with vLLM servers that return their routing: balanced, it trains as verl alone."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from tests.stacks import faults
from tests.stacks.trainer import ACTOR, BLOCK, MEGATRON, Run, launch, metrics_of, run

STEPS = 12
TOLERANCE = 1e-4
"""relative, of losses and gradient norms; they differ by less than 1e-6"""
PLANTED = {faults.GRADIENTS: 4, faults.STALE: 5, faults.SHIFTED: 6}
"""faults and their steps"""
PROBABILITIES = "training/rollout_probs_diff_max"
"""largest difference between vLLM's and Megatron's probability of a sampled token"""
COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/score/mean")
RECOMPUTED_AND_OFFLOADED = [
    *(f"++{MEGATRON}.override_transformer_config.recompute_{name}" for name in ("granularity=full", "method=uniform")),
    f"++{MEGATRON}.override_transformer_config.recompute_num_layers=1",
    f"{MEGATRON}.param_offload=True", f"{MEGATRON}.optimizer_offload=True",
]  # fmt: skip


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="eq-"))  # short: Ray's sockets are below it
    yield folder
    if "EQUILIBRA_TEST_KEEP" not in os.environ:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plain(work: Path) -> Run:
    """verl without Equilibra."""
    return run(work, "plain", STEPS, plugin=False)


def same(found: Run, plain: Run, steps: range, *, at_least: int = 1) -> None:
    """The same answers in these steps; losses and gradient norms to rounding.

    vLLM routes live: in time rounding decides a near tie between two experts otherwise, and the runs part. Steps are
    compared up to there, and there must be `at_least` so many of them.
    """
    assert set(steps) <= set(found.metrics)
    assert max(found.metrics[step][PROBABILITIES] for step in steps) < 1e-5
    alike = list(takewhile(lambda step: found.routing[step] == plain.routing[step], steps))
    assert len(alike) >= at_least, f"vLLM's routing differs from step {steps[0] + len(alike)} on"
    for step in alike:
        assert found.answers[step] == plain.answers[step], f"answers of step {step} differ"
        for name in COMPARED:
            wanted = plain.metrics[step][name]
            assert found.metrics[step][name] == pytest.approx(wanted, rel=TOLERANCE, abs=1e-5), f"{name} of step {step}"


@pytest.fixture(scope="module")
def balanced(work: Path) -> Run:
    """Under plans, with one fault in each of three steps; verl takes a minute to start, so they share a run."""
    return run(work, "balanced", STEPS, faults=",".join(f"{name}={step}" for name, step in PLANTED.items()))


def test_balanced_training_is_plain_training(balanced: Run, plain: Run) -> None:
    """The steps before the first fault; over all, the model learns, and rows counted outside Equilibra are even."""
    found = balanced
    clean = range(1, min(PLANTED.values()))
    same(found, plain, clean, at_least=len(clean))
    assert plain.slowest_over_mean > 1.1
    assert found.slowest_over_mean < 1.05
    assert min(found.of("actor/equilibra/copies")) > 0
    assert max(found.of("actor/equilibra/imbalance_after")) < 1.05
    for one in (plain, found):
        score = one.of("critic/score/mean")
        assert np.mean(score[-3:]) > 2 * np.mean(score[:3]), "nothing was learned"


def test_switched_off_is_verl_alone(work: Path, plain: Run) -> None:
    """With the plugin and `enabled=False`, all figures of training are bit-identical."""
    found = run(work, "off", 2, [f"{BLOCK}.enabled=False"])
    for step in (1, 2):
        assert found.answers[step] == plain.answers[step]
        assert found.routing[step] == plain.routing[step]
        assert figures(found, step) == figures(plain, step)


def figures(found: Run, step: int) -> dict[str, str]:
    """What the actor and its rewards report, but times and memory. vLLM's log-probabilities vary with its batches."""
    kept = [name for name in found.metrics[step] if name.startswith(("actor/", "critic/")) and "/perf/" not in name]
    assert "actor/grad_norm" in kept
    return {name: repr(found.metrics[step][name]) for name in kept}


def test_faults_are_noticed(balanced: Run, plain: Run) -> None:
    """The controls: without them `same` would hold."""
    dropped = PLANTED[faults.GRADIENTS]
    with pytest.raises(AssertionError):
        same(balanced, plain, range(1, STEPS + 1), at_least=dropped)
    assert balanced.answers[dropped] == plain.answers[dropped]
    found, wanted = (one.metrics[dropped]["actor/grad_norm"] for one in (balanced, plain))
    assert abs(found - wanted) > TOLERANCE * wanted, "dropped gradients were not noticed"
    wrong = [step for step in range(1, STEPS + 1) if balanced.metrics[step][PROBABILITIES] > 1e-3]
    assert wrong == [PLANTED[faults.STALE], PLANTED[faults.SHIFTED]]


def test_killed_and_resumed(work: Path, plain: Run) -> None:
    """Full recompute and offloading, two nodes of one rank. A worker is killed after a checkpoint; another run goes on.

    The first run has standing copies, the second moves homes, from which weights are exported after every step.
    """
    prices = work / "prices.json"
    prices.write_text('{"base": "h200", "nic_gb_per_s": 1e9}')  # copies and moves pay even for a few tokens
    settings = [*RECOMPUTED_AND_OFFLOADED, f"{BLOCK}.ranks_per_node=1", f"{BLOCK}.hardware={prices}"]
    settings += [f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]"]
    first = launch(work, "resumed", STEPS, [*settings, "trainer.save_freq=2"])
    pid, saved = first.folder / "rows" / "0.pid", first.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    until = time.monotonic() + 600
    while not saved.exists():
        assert first.process.poll() is None, first.tail()
        assert time.monotonic() < until, f"no checkpoint:\n{first.tail()}"
        time.sleep(0.1)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert first.wait(300) != 0, "a run that lost a worker ended well"
    step = int(saved.read_text())
    assert metrics_of(first.folder / "metrics.jsonl")[1]["actor/equilibra/standing_copies"] > 0
    shutil.move(first.folder / "metrics.jsonl", first.folder / "metrics_before.jsonl")
    shutil.rmtree(first.folder / "rows")
    moving = [f"{BLOCK}.standing_slots=0", f"{BLOCK}.max_moves_per_layer=-1"]
    found = run(work, "resumed", step + 2, [*settings, *moving, "trainer.resume_mode=auto"])
    same(found, plain, range(step + 1, step + 3))
    assert max(found.of("actor/equilibra/log_prob_moves") + found.of("actor/equilibra/moves")) > 0
