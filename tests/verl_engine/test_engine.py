"""verl's own Megatron engine learns the same, planned or not. A test is one start of processes: verl loads slowly."""

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.verl_engine import runs


def same(found: dict, plain: dict, *, copies: bool = True, kind: str = "copies", moves: bool = False) -> None:
    """Losses, log-probabilities and exported weights as verl has them alone; copies were made, and evened out ranks."""
    np.testing.assert_allclose(found["losses"], plain["losses"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["norms"], plain["norms"], rtol=2e-5)
    np.testing.assert_allclose(found["log_probs"], plain["log_probs"], rtol=1e-5)
    assert found["weights"] < 2e-5
    assert found["balanced"]
    assert not plain["balanced"]
    for metrics in found["metrics"]:
        (before,), (after,) = metrics["equilibra/imbalance_before"], metrics["equilibra/imbalance_after"]
        assert (metrics[f"equilibra/{kind}"][0] > 0) == copies
        assert after < before if copies else after == pytest.approx(before)
        assert moves or metrics["equilibra/moves"] == [0.0]
    assert (found["by rank"] > 1e-2) == moves, "the control: numbered by rank, exported experts would be others"


def test_two_ranks() -> None:
    """Replay of rollouts and of recordings; offloading, recompute, micro-batches, moved homes, live and history."""
    every = run_ranks(2, runs.on_two_ranks, timeout_s=300)
    for found in every:
        plain = found["plain"]
        assert plain["metrics"] == [{}] * (runs.STEPS + 1)
        for name in ("balanced", "verified", "logprob"):
            same(found[name], plain)
        of_verified(found["verified"], num=2)
        same(found["standing"], plain, kind="standing_copies")
        same(found["homes"], plain, kind="standing_copies", moves=True)
        assert sum(metrics["equilibra/moves"][0] for metrics in found["homes"]["metrics"]) > 0
        of_verified(found["homes"], num=1)
        of_live(found["live"], found["plain live"])
        of_live(found["live on nodes"], found["plain live"], first=1)  # no standing copies in the first step
        of_history(found["history"], found["plain live"])
        of_metrics(found["balanced"])
        of_recording(*found["recorded"])
        for planned, recorded in found["counted"].values():  # every pair once, however sequences are cut
            assert np.array_equal(planned, recorded)
            assert planned.sum() > 100
        replayed = found["replayed as planned"]
        assert replayed["calls"] == 2 * len(replayed["same"]) > 8
        assert all(replayed["same"])
        assert replayed["live"] > 0
        of_refusals(found["refused"])
        # the control: without the gradients of copies, the same comparisons fail
        assert found["sabotaged"]["weights"] > 1e-3
        assert np.abs(np.subtract(found["sabotaged"]["losses"], plain["losses"])).max() > 1e-3
        (noticed,) = found["noticed"]
        assert noticed.startswith("MismatchError: balancing changes this run's numbers by more than rounding, most in")
        assert ".mlp.experts." in noticed


@pytest.mark.slow
def test_more_on_two_ranks() -> None:
    """Options of verl and Megatron, tensor and context parallelism, checkpoints under moved homes."""
    every = run_ranks(2, runs.more_on_two_ranks, timeout_s=300)
    of_rows(every)
    for found in every:
        plain = found["plain"]
        same(found["gathered"], plain)
        same(found["static"], plain, copies=False)
        assert found["static"]["weights"] == 0
        for name in ("tensor parallel", "context parallel"):
            same(found[name]["balanced"], found[name]["plain"])
        # the same sequences, whole and cut between ranks: the tests' own attention is right
        whole, cut = every[0]["plain"]["log_probs"], found["context parallel"]["plain"]["log_probs"]
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-6)
        of_checkpoint(found["checkpoint"], plain)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [None, 2], ids=["1F1B", "interleaved"])
def test_two_pipeline_stages(chunks: int | None) -> None:
    """Ranks of the first stage have no outputs: what is logged is of the last one's layers."""
    every = run_ranks(4, runs.on_two_stages, chunks, timeout_s=300)
    assert sum(found["plain"]["last"] for found in every) == 2
    for found in every:
        assert found["balanced"]["planned"]
        if found["plain"]["last"]:
            same(found["balanced"], found["plain"])
        else:
            assert found["balanced"]["weights"] < 2e-5


def of_rows(every: list[dict]) -> None:
    """Rows where they enter Megatron's experts: more even, and some of them in experts that the model does not have.

    Not as even as planned: in sequences this short, many rows are routed live.
    """
    for name in ("tensor parallel", "context parallel"):
        balanced, plain = ([found[name][kind] for found in every] for kind in ("balanced", "plain"))
        assert slowest_over_mean(balanced) - 1 < (slowest_over_mean(plain) - 1) / 2
        assert all(found["rows of copies"] > 0 for found in balanced)
        assert not any(found["rows of copies"] for found in plain)


def slowest_over_mean(of_ranks: list[dict]) -> float:
    rows = np.array([found["rows"] for found in of_ranks])
    return float(rows.max(axis=0).sum() / rows.mean(axis=0).sum())


def of_checkpoint(found: dict, plain: dict) -> None:
    """Homes moved before log-probabilities and not again for the same micro-batches; saved, and loaded in two engines.

    The first had moved its homes again.
    """
    assert found["planned"]["equilibra/log_prob_moves"] > 0
    assert found["first"]["equilibra/moves"] == [0.0]
    assert found["first"]["equilibra/plan_reused"] == [1.0]
    assert all(found["moved"])
    np.testing.assert_allclose(found["saved"], plain["losses"][:3], rtol=2e-5)
    for losses in found["loaded"]:
        np.testing.assert_allclose(losses, found["saved"][1:], rtol=2e-5)
    buffers, copies = found["said"]
    assert "dp_reshardable" in buffers, "the control: without restoring, buffers would be of other experts"
    assert "while homes move" in copies
    assert "equilibra.max_moves_per_layer=0" in copies


def of_live(found: dict, plain: dict, first: int = 0) -> None:
    """Without replay, planned from what the routers choose. first: step from which on there are copies."""
    np.testing.assert_allclose(found["losses"], plain["losses"], rtol=2e-5, atol=1e-6)
    assert found["weights"] < 2e-5
    assert plain["metrics"] == [{}] * (runs.STEPS + 1)
    for metrics in found["metrics"][first:]:
        assert metrics["equilibra/imbalance_after"][0] < metrics["equilibra/imbalance_before"][0]
        assert "equilibra/copies" not in metrics


def of_history(found: dict, plain: dict) -> None:
    """Without replay, planned from past steps."""
    np.testing.assert_allclose(found["losses"], plain["losses"], rtol=2e-5, atol=1e-6)
    assert found["weights"] < 2e-5
    after, before = (
        [metrics[f"equilibra/imbalance_{when}"][0] for metrics in found["metrics"]] for when in ("after", "before")
    )
    assert after[0] == before[0] > 1, "the first step ran on homes"
    assert sum(after[1:]) < sum(before[1:])


def of_metrics(found: dict) -> None:
    """The trainer gets a number for each; the plan of log-probabilities is used again for the same micro-batches."""
    names = {
        "imbalance_before",
        "imbalance_after",
        "predicted_gain",
        "copies",
        "standing_copies",
        "moves",
        "plan_reused",
    }
    names |= {"planning_s"}
    logged = found["logged"]
    assert set(logged) == {f"equilibra/{part}{name}" for part in ("", "log_prob_") for name in names}
    assert logged["equilibra/plan_reused"] == 1
    assert logged["equilibra/log_prob_plan_reused"] == 0
    assert logged["equilibra/predicted_gain"] > 1
    assert logged["equilibra/planning_s"] > 0
    assert set(found["planned"]) == {f"equilibra/log_prob_{name}" for name in names}
    for metrics in found["metrics"][1:]:
        assert set(metrics) == {f"equilibra/{name}" for name in names}
        assert metrics["equilibra/plan_reused"] == [0.0]


def of_verified(found: dict, *, num: int) -> None:
    """The first updates were also made without a plan, and differed by rounding."""
    names = {f"equilibra/verify_{name}" for name in ("outputs", "experts", "routers", "weights")}
    for metrics in found["metrics"][:num]:
        assert 0 < metrics["equilibra/verify_experts"][0] < 1
        assert all(metrics[name][0] < 1 for name in names)
    assert not any(names & set(metrics) for metrics in found["metrics"][num:])


def of_recording(plain: dict, found: dict) -> None:
    """R2: what is recorded is recorded without a plan, and then replayed under one."""
    assert np.array_equal(plain["routed"], found["routed"])
    assert found["recording"] == {}
    assert found["loss"] == pytest.approx(plain["loss"], rel=2e-5)
    assert found["metrics"]["equilibra/copies"][0] > 0


def of_refusals(said: dict) -> None:
    assert "cannot plan without replay" in said["replay is off"]
    assert "router_replay.mode=R3" in said["replay is off"]
    assert "cannot replay routing with moe_router_fusion=True" in said["router fusion"]
    assert "has no option spare_slot: it has enabled, mode, planner" in said["unknown option"]
    assert "verify_steps needs recorded routing: set it to 0 with mode='live'" in said["verify without replay"]
    assert said["reference model"] == "None"
