"""slime's rollouts learn the same with Equilibra's hooks. slime itself is not on PyPI: a stand-in keeps its order."""

from dataclasses import replace

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import slime_runs
from tests.megatron_core.slime_runs import Case, slowest_over_mean

from equilibra.cost.presets import default_prices


def losses(found: dict) -> np.ndarray:
    return np.array([value for name in ("reference", "old", "update") for value in found[name]])


def same(found: list[dict], *, old: bool = True, rollouts: int = 1) -> None:
    for one in found:
        assert not one["error"]
        assert len(one["plain"]["reference"]) == 5 * rollouts
        assert len(one["plain"]["old"]) == 5 * rollouts * old
        assert len(one["plain"]["update"]) == 2 * rollouts
        np.testing.assert_allclose(losses(one["hooked"]), losses(one["plain"]), rtol=2e-6)
        assert one["weights"] < 2e-5


def rows(found: list[dict], stage: str) -> list[list[int]]:
    return [one["rows"][stage] for one in found]


FAST = replace(default_prices(), nic_gb_per_s=1e9)
"""a network on which standing copies pay even for a few tokens"""
WITHOUT_REPLAY = {"equilibra_ranks_per_node": 1, "equilibra_hardware": FAST}
CASES = {
    "rollout": Case(rollouts=2),
    "recorded": Case(rollout_routes=False, options={}, rollouts=2),
    "no old": Case(log_probs=False),
    "switch": Case(arguments={"equilibra_planner": "static"}),
    **{
        mode: Case(replays=False, rollouts=3, arguments={"equilibra_mode": mode, **WITHOUT_REPLAY})
        for mode in ("live", "history")
    },
    "other order": Case(sabotage="plan of the micro-batches in another order"),
    "no hook": Case(sabotage="no hook before a step"),
    "dropped": Case(sabotage="drop gradients of copies"),  # the last: it breaks the processes that it runs in
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict]]:
    """What each of two ranks found, case by case."""
    found = run_ranks(2, slime_runs.against_plain, CASES)
    return {name: [of_rank[name] for of_rank in found] for name in CASES}


def test_routes_of_the_rollout_are_replayed_under_one_plan(runs: dict) -> None:
    """Reference, old log-probabilities, two optimizer steps of three and two micro-batches; two rollouts; recompute."""
    found = runs["rollout"]
    same(found, rollouts=2)
    # each of 2 layers: 2 rollouts of 5 micro-batches, before the update and in it
    assert len(found[0]["rows"]["replay_forward"]) == 2 * 2 * 5 * 2
    assert len(found[0]["rows"]["replay_backward"]) == 2 * 2 * 5
    assert slowest_over_mean(rows(found, "replay_forward")) < 1.05
    assert slowest_over_mean(rows(found, "replay_backward")) < 1.05
    assert slowest_over_mean(rows(found, "fallthrough")) > 1.05


def test_one_process_logs_where_slime_does(runs: dict) -> None:
    logged = runs["rollout"][0]["logged"]
    assert not runs["rollout"][1]["logged"]
    assert [list(one) for one in logged[::2]] == [["equilibra_plan"]] * 2
    for number, one in enumerate(logged[1::2]):
        assert one["perf/equilibra_planned_imbalance"] < 1.05 < one["perf/equilibra_static_imbalance"]
        assert (one["rollout/step"], one["key"]) == (number, "rollout/step")


def test_routes_of_the_pass_before_are_replayed(runs: dict) -> None:
    same(runs["recorded"], rollouts=2)
    assert slowest_over_mean(rows(runs["recorded"], "replay_forward")) < 1.05 < _static(runs["recorded"])


def test_no_pass_for_old_log_probabilities(runs: dict) -> None:
    same(runs["no old"], old=False)
    assert slowest_over_mean(rows(runs["no old"], "replay_forward")) < 1.05


@pytest.mark.parametrize("mode", ["live", "history"])
def test_without_replay_standing_copies_follow_past_steps(runs: dict, mode: str) -> None:
    """Reference weights come and go between the steps; the first step has no copies."""
    found = runs[mode]
    same(found, rollouts=3)
    logged = found[0]["logged"]
    first = 0 if mode == "live" else 1  # history has seen nothing before the first step
    assert [one["rollout/step"] for one in logged] == list(range(first, 3))
    for one in logged[1 - first :]:
        assert one["perf/equilibra_planned_imbalance"] < one["perf/equilibra_static_imbalance"]
    ran = rows(found, "replay_forward")  # 5 micro-batches of a rollout, in 2 layers
    later = slowest_over_mean([of_rank[2 * 5 :] for of_rank in ran])
    assert later < (1.06 if mode == "live" else _static(found, of_rollouts=logged[1 - first :]))
    assert slowest_over_mean([of_rank[: 2 * 3] for of_rank in ran]) > later, "the first step ran on homes"


def test_the_switch_in_slimes_options(runs: dict) -> None:
    same(runs["switch"])
    assert slowest_over_mean(rows(runs["switch"], "replay_forward")) == pytest.approx(_static(runs["switch"]))


def _static(found: list[dict], of_rollouts: list[dict] | None = None) -> float:
    """Slowest over mean rank as slime would have it, over all rollouts."""
    logged = of_rollouts or found[0]["logged"][1::2]
    return float(np.mean([one["perf/equilibra_static_imbalance"] for one in logged]))


def test_gradients_that_are_lost_are_noticed(runs: dict) -> None:
    found = runs["dropped"]
    assert max(one["weights"] for one in found) > 1e-3
    assert not np.allclose(losses(found[0]["hooked"]), losses(found[0]["plain"]), rtol=1e-4)


def test_a_plan_of_other_micro_batches_is_noticed(runs: dict) -> None:
    """Pairs find their experts whatever was planned, so losses are the same; ranks are not even."""
    same(runs["other order"])
    assert slowest_over_mean(rows(runs["other order"], "replay_forward")) > 1.05


def test_a_hook_that_is_not_set_is_noticed(runs: dict) -> None:
    for one in runs["no hook"]:
        assert "forward 6 of MoE layer 0 has no plan: the step has 5 micro-batches" in one["error"]


@pytest.mark.slow
def test_process_groups_that_are_made_again_without_replay() -> None:
    arguments = {"equilibra_mode": "live", **WITHOUT_REPLAY}
    case = Case(replays=False, rollouts=2, offload="world", arguments=arguments)
    same([one["live"] for one in run_ranks(2, slime_runs.against_plain, {"live": case})], rollouts=2)


@pytest.mark.parametrize("what", [pytest.param("groups", marks=pytest.mark.slow), "world"])
def test_process_groups_that_are_made_again(what: str) -> None:
    """--offload-train, as it was up to 2026-08 and as it is."""
    found = run_ranks(2, slime_runs.against_plain, {"offload": Case(rollouts=2, offload=what, options={})})
    same([of_rank["offload"] for of_rank in found], rollouts=2)
    assert slowest_over_mean(rows([of_rank["offload"] for of_rank in found], "replay_forward")) < 1.05


def test_two_pipeline_stages() -> None:
    """Micro-batches are in flight; only the last stage has losses, and logs."""
    found = run_ranks(4, slime_runs.against_plain, {"stages": Case(pipeline=2)}, 2)
    first, last = ([of_rank["stages"] for of_rank in found[at : at + 2]] for at in (0, 2))
    same(last)
    for one in first:
        assert not one["error"]
        assert one["weights"] < 2e-5
        assert not one["hooked"]["old"]
    for stage in (first, last):
        assert slowest_over_mean(rows(stage, "replay_forward")) < 1.05
        assert slowest_over_mean(rows(stage, "replay_backward")) < 1.05
    assert [bool(of_rank["stages"]["logged"]) for of_rank in found] == [False, False, True, False]


SAID = {
    "replay off": "add --use-rollout-routing-replay",
    "mode live": "equilibra_mode must be one of replay, live, history",
    "mode and replay": "equilibra_mode live ignores the routing that slime replays",
    "router without replay": "a router has no routing_replay",
    "fused router": "--moe-router-fusion",
    "unknown option": "equilibra_slots is not an option: use equilibra_mode",
    "nothing recorded": "which --use-rollout-logprobs skips",
    "lists of other lengths": "routers have recorded 2 to 3 micro-batches",
    "lists of other lengths on one rank": "routers have recorded 2 to 3 micro-batches",
    "routes that come later": "recorded routing must be tensors, not str",
    "routers apart": "routers have replayed 0 to 1 micro-batches",
    "plan and replay apart": "optimizer step 1 replays from micro-batch 1 on, but the plan is at 0",
    "not from the start": "from its first micro-batch, not from 1",
}


def test_what_cannot_be_planned_is_refused() -> None:
    for said in run_ranks(2, slime_runs.refusals):
        assert set(said) == set(SAID), "a critic is left alone"
        for name, words in SAID.items():
            assert words in said[name]
    assert "reading the routing of a rollout failed on rank 0" in said["lists of other lengths on one rank"]


def test_layers_from_a_specification() -> None:
    for found in run_ranks(2, slime_runs.from_spec):
        assert found["block"] == ["BalancedMoELayer"] * 2
        assert found["other"] == "BalancedMoELayer"
        assert "moe_token_dispatcher_type='allgather'" in found["said"]


@pytest.mark.slow
def test_every_way_of_recompute() -> None:
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    cases = {
        f"{options} {routes}": Case(options=options, rollout_routes=routes)
        for options in ({}, selective)
        for routes in (True, False)
    }
    found = run_ranks(2, slime_runs.against_plain, cases)
    for name in cases:
        same([of_rank[name] for of_rank in found])
