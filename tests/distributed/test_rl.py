"""RL runs: planner, ranks and interruptions change no number of them."""

import shutil
from dataclasses import replace
from math import isfinite

import pytest
from tests.distributed.ranks import collect, run_ranks, start_ranks
from tests.distributed.rl_runs import (
    ALONE,
    GROUPS,
    NODES,
    Notes,
    largest_gap,
    run,
    run_all,
    run_until_killed,
    run_with_nan,
    same_run,
    small,
)
from tests.references.hf_models import small_config

from equilibra.execute.state.checkpoint import checkpoint_steps
from equilibra.rl.recording import read_samples, write_samples

ALGORITHMS = ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gspo", "ppo")), "tppo"]
ROUNDING = 1e-6
"""absolute where numbers are below 1; transformers computes norms and routers in float32 inside a float64 model"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = small_config("qwen3_moe")
    config.initializer_range = 0.08
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Runs of four steps that nothing interrupted, each made once."""
    made = {}

    def of(algorithm="grpo"):
        if algorithm not in made:
            config = small(model, algorithm=algorithm, run__steps=4)
            made[algorithm] = trained(config, tmp_path_factory.mktemp("whole") / algorithm)
        return made[algorithm]

    return of


def trained(config, folder, **options):
    folder.mkdir(exist_ok=True)
    processes = config.cluster.num_processes
    return run_ranks(processes, run, config, folder, *options.values(), timeout_s=240)[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planner_and_ranks_change_no_number(algorithm, model, whole, tmp_path):
    config = small(model, algorithm=algorithm, run__steps=4)
    balanced = whole(algorithm)
    two = replace(ALONE, ranks_per_node=2)
    static = trained(
        replace(config, cluster=two, balance=replace(config.balance, planner="static")), tmp_path / "static"
    )
    alone = trained(replace(config, cluster=ALONE), tmp_path / "alone")
    for other in (static, alone):
        rewards = [note["reward"] for note in balanced.steps]
        assert [note["reward"] for note in other.steps] == pytest.approx(rewards, rel=1e-12)
        assert largest_gap(balanced, other) < ROUNDING
    assert all(note["mismatch_max"] < 1e-4 for note in balanced.steps)
    assert all(note["tokens_without_routing"] == 0 for note in balanced.steps)
    assert balanced.steps[-1]["gradient_norm"] > 1e-3  # rewards differ, something is learned
    assert balanced.steps[-1]["imbalance"] < balanced.steps[-1]["imbalance_static"]


@pytest.mark.parametrize("algorithm", ["tppo"])
def test_a_stopped_run_goes_on_to_the_same_numbers(algorithm, model, whole, tmp_path):
    config = small(model, algorithm=algorithm, run__steps=4)
    first = trained(config, tmp_path / "run", resume=False, stop_after=2)
    assert len(first.steps) == 2
    rest = trained(config, tmp_path / "run", resume=True)
    assert [note["step"] for note in rest.steps] == [2, 3]
    assert same_run(whole(algorithm), rest, from_step=2)


def uneven(model, cluster):
    """Runs in which ranks or whole groups have no sequence of a mini-batch, of a step or of an evaluation."""
    few = {"cluster": cluster, "run__steps": 1, "run__evaluate_problems": 1, "rollout__prompts": 1}
    configs = {
        f"few {algorithm}": small(model, algorithm=algorithm, **few, algorithm__mini_batches=1)
        for algorithm in ("grpo", "gspo", "ppo")
    }
    odd = {"cluster": cluster, "run__steps": 4, "rollout__prompts": 3, "rollout__answers": 1}
    configs["odd tppo"] = small(model, algorithm="tppo", **odd)
    half = {"cluster": GROUPS if cluster is NODES else cluster, "rollout__prompts": 4, "balance__planner": "static"}
    configs["half grpo"] = small(model, **half, run__steps=1)
    configs["half tppo"] = small(model, algorithm="tppo", **half, run__steps=3)
    return configs


@pytest.mark.parametrize(
    "names",
    [
        ("few ppo", "half tppo"),
        pytest.param(("few grpo", "few gspo", "half grpo", "odd tppo"), marks=pytest.mark.slow),
    ],
    ids=["with values", "the others"],
)
def test_ranks_and_groups_without_sequences(names, model, tmp_path):
    """They make every collective call that the others make, and change no number."""
    on = {cluster: {name: uneven(model, cluster)[name] for name in names} for cluster in (NODES, ALONE)}
    several = run_ranks(4, run_all, on[NODES], tmp_path / "several", timeout_s=300)
    (alone,) = run_ranks(1, run_all, on[ALONE], tmp_path / "alone", timeout_s=300)
    for name, notes in alone.items():
        assert largest_gap(notes, several[0][name]) < ROUNDING, name
        assert max(note["gradient_norm"] for note in notes.steps) > 1e-3, name


def test_a_run_stopped_in_its_last_step_is_complete(model, tmp_path):
    config = small(model, cluster=ALONE, run__steps=1, algorithm__mini_batches=1)
    told = trained(config, tmp_path / "told", resume=False, stop_after=1)
    assert [step for step, _ in told.held_out] == [0, 1]


def test_a_run_goes_on_with_other_ranks(model, whole, tmp_path):
    config = small(model, algorithm="tppo", run__steps=4)
    trained(config, tmp_path / "run", resume=False, stop_after=2)
    rest = trained(small(model, algorithm="tppo", run__steps=4, cluster=ALONE), tmp_path / "run", resume=True)
    late = Notes()
    late.steps, late.held_out = whole("tppo").steps[2:], whole("tppo").held_out[1:]
    assert largest_gap(late, rest) < ROUNDING


def killed_and_resumed(config, folder, stage, step, victims):
    """Start a run, kill ranks at a moment, and go on."""
    folder.mkdir()
    processes, pipes, _ = start_ranks(
        config.cluster.num_processes, run_until_killed, config, folder, stage, step, victims
    )
    outcomes = collect(processes, pipes, 200)
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome.died == -9, f"rank {rank} was not killed: {outcome}"
        else:
            assert outcome.error is not None, f"rank {rank} did not notice"
            assert outcome.error.startswith("RankLostError"), outcome
    return trained(config, folder, resume=True)


@pytest.mark.parametrize(
    ("stage", "victims"),
    [pytest.param("update", (1,), marks=pytest.mark.slow), ("checkpoint", (0, 1, 2, 3))],
)
def test_killed_ranks_lose_nothing(stage, victims, model, whole, tmp_path):
    config = small(model, run__steps=4, run__timeout_s=30.0)
    rest = killed_and_resumed(config, tmp_path / "run", stage, 2, victims)
    assert rest.steps[0]["step"] == 2
    assert same_run(whole(), rest, from_step=2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "tppo"])
@pytest.mark.parametrize("victims", [(0,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    "stage", ["rollout", "reward", "plan", "logprob", "advantages", "update", "weights", "checkpoint"]
)
def test_killed_at_every_stage(stage, victims, algorithm, model, whole, tmp_path):
    config = small(model, algorithm=algorithm, run__steps=4, run__timeout_s=30.0)
    rest = killed_and_resumed(config, tmp_path / "run", stage, 2, victims)
    assert rest.steps[0]["step"] == 2
    assert same_run(whole(algorithm), rest, from_step=2)


def test_a_damaged_checkpoint_is_not_used(model, whole, tmp_path):
    config = small(model, run__steps=4)
    trained(config, tmp_path / "run", resume=False, stop_after=2)
    newest = max((tmp_path / "run" / "checkpoints" / "policy").glob("step-*"))
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    rest = trained(config, tmp_path / "run", resume=True)
    assert "step 2 cannot be used" in rest.said[0]
    assert [note["step"] for note in rest.steps] == [1, 2, 3]
    assert same_run(whole(), rest, from_step=1)
    aside = newest.with_name("step-00000002.aside")
    assert (aside / shard.name).read_bytes() == data  # it was newer than the one resumed from: nobody deletes it


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(model, tmp_path):
    """Neither an older one is used, nor is it deleted: once the disk is back, the run goes on from it."""
    config = small(model, algorithm="tppo", cluster=ALONE, run__steps=3)
    trained(config, tmp_path / "run", resume=False, stop_after=2)
    value = tmp_path / "run" / "checkpoints" / "value"
    for part in ("policy", "value", "carried"):
        newest = max((tmp_path / "run" / "checkpoints" / part).glob("step-*"))
        file = max(newest.glob("*[zp]"), key=lambda path: path.stat().st_size)
        file.rename(tmp_path / "away")
        file.symlink_to(file)
        with pytest.raises(AssertionError, match=f"UnreadableError.*{file.name}.*step 2 may be intact"):
            trained(config, tmp_path / "run", resume=True)
        file.unlink()
        (tmp_path / "away").rename(file)
    shutil.copytree(value / "step-00000002", value / "step-00000004")  # as if killed before the policy was written
    rest = trained(config, tmp_path / "run", resume=True)
    assert [note["step"] for note in rest.steps] == [2]
    assert rest.said == []
    assert {path.name for path in value.iterdir()} == {f"step-{step:08d}" for step in (1, 2, 3)}
    shutil.rmtree(value.with_name("policy"))  # as if killed in the very first checkpoint
    again = trained(config, tmp_path / "run", resume=False, stop_after=1)
    assert [note["step"] for note in again.steps] == [0]
    assert {path.name for path in value.iterdir()} == {"step-00000001"}


def test_training_from_a_recording(model, tmp_path):
    """Learns what the run that was recorded learned, without an engine and on other ranks."""
    live = trained(small(model, debug__record=str(tmp_path / "rollouts")), tmp_path / "live")
    replayed = trained(
        small(model, debug__replay=str(tmp_path / "rollouts"), cluster=GROUPS), tmp_path / "replayed"
    )  # fmt: skip
    assert replayed.held_out == []
    replayed.held_out = live.held_out
    assert largest_gap(live, replayed) < ROUNDING
    assert all(note["mismatch_max"] < 1e-4 for note in replayed.steps)


def test_a_recording_of_another_model_is_refused(model, tmp_path):
    trained(small(model, cluster=ALONE, debug__record=str(tmp_path / "rollouts")), tmp_path / "live")
    other = tmp_path / "other"
    config = small_config("qwen3_moe")
    config.num_experts = 16
    config.save_pretrained(other)
    with pytest.raises(AssertionError, match=r"InputError.*8 experts.*16"):
        trained(small(other, cluster=ALONE, debug__replay=str(tmp_path / "rollouts")), tmp_path / "replayed")


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["k1", "k3"])
def test_divergence_from_the_reference(divergence, model, tmp_path):
    options = {"loss.divergence": divergence, "loss.kl_weight": 0.1, "loss.entropy_weight": 0.01}
    alone = trained(small(model, cluster=ALONE, algorithm__options=options), tmp_path / "alone")
    both = trained(small(model, cluster=GROUPS, algorithm__options=options), tmp_path / "both")
    assert largest_gap(alone, both) < ROUNDING
    assert abs(alone.steps[0]["divergence"]) < abs(alone.steps[-1]["divergence"])


def test_tokens_without_routing_are_counted_and_routed_live(model, tmp_path):
    folder = tmp_path / "rollouts"
    one = {"cluster": ALONE, "run__steps": 1, "algorithm__mini_batches": 1}
    live = trained(small(model, **one, debug__record=str(folder)), tmp_path / "live")
    (file,) = folder.glob("step-*.npz")
    forgotten = []
    for sample in read_samples(file):
        (segment,) = sample.segments
        experts = segment.experts.copy()
        experts[::5] = -1
        forgotten.append(replace(sample, segments=(replace(segment, experts=experts),)))
    write_samples(file, forgotten, overwrite=True)
    again = trained(small(model, **one, debug__replay=str(folder)), tmp_path / "again")
    rows = sum(len(sample.segments[0].experts[::5]) for sample in forgotten)
    assert again.steps[0]["tokens_without_routing"] == rows > 0
    assert again.steps[0]["mismatch_max"] < 1e-4  # the weights are those of the rollout, and so is what they choose
    assert again.steps[0]["loss"] == pytest.approx(live.steps[0]["loss"], abs=1e-6)


def test_a_step_without_a_finite_gradient_is_skipped_and_several_end_the_run(model, tmp_path):
    """In bfloat16, with masters: a NaN on one rank of two."""
    cluster = replace(ALONE, ranks_per_node=2)
    config = small(model, cluster=cluster, run__dtype="bfloat16", run__keep=1, optimizer__max_skipped_steps=2)
    (tmp_path / "skipped").mkdir()
    for notes, error in run_ranks(2, run_with_nan, config, tmp_path / "skipped", (1,), timeout_s=240):
        assert error == ""
        assert [note["skipped_steps"] for note in notes.steps] == [0.0, 2.0, 0.0]
        assert isfinite(notes.steps[2]["gradient_norm"])
        assert isfinite(notes.steps[2]["loss"])
    (tmp_path / "ended").mkdir()
    for notes, error in run_ranks(2, run_with_nan, config, tmp_path / "ended", (1, 2), timeout_s=240):
        assert len(notes.steps) == 2
        assert error.startswith("step 3: the gradient norm is nan, not finite in ")
        assert "3 optimizer steps in a row, optimizer.max_skipped_steps is 2" in error
    assert checkpoint_steps(tmp_path / "ended" / "checkpoints" / "policy") == [2]
