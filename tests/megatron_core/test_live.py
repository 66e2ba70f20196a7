"""Without replay, planned from what a router has just chosen or from past steps, training stays the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import live_runs
from tests.megatron_core.gpt_runs import FULL, SELECTIVE
from tests.megatron_core.live_runs import STEPS, Case

LIVE, NODES, HISTORY = Case(), Case(per_node=2), Case(mode="history")


def same(found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["balanced"], found["plain"], rtol=2e-6)
    assert found["weights"] < 2e-5


@pytest.mark.parametrize(
    "options", [{}, FULL, pytest.param(SELECTIVE, marks=pytest.mark.slow)], ids=["none", "full", "selective"]
)
def test_live_plans_train_as_plain_megatron_does(options: dict[str, Any]) -> None:
    for found in run_ranks(4, live_runs.against_plain, replace(LIVE, options=options)):
        same(found)
        assert found["begun"] == [False] * STEPS, "one node needs no standing copies"
        assert found["flash"] > 0
        for static, planned in found["observed"]:
            assert planned < 1.1 < static
        assert found["again"] == (1.0, 1.0)
        assert "call begin_from_past_steps() instead of begin()" in found["said"]


@pytest.mark.parametrize(
    "case",
    [
        replace(NODES, options=FULL, overlap=True),
        replace(NODES, options=SELECTIVE, per_node=1, gives_optimizer=False),
        pytest.param(replace(NODES, expert_parallel=2, per_node=1, overlap=True), marks=pytest.mark.slow),
    ],
    ids=["full", "selective, one rank a node, without the optimizer", "two replicas"],
)
def test_live_plans_level_nodes_with_standing_copies_of_past_steps(case: Case) -> None:
    for found in run_ranks(4, live_runs.against_plain, case):
        same(found)
        assert found["begun"] == [False, *[True] * (STEPS - 1)], "nothing is known before the first step"
        assert min(found["standing"]) > 0
        assert found["moves"] == 0
        (_, without), *levelled = found["observed"]
        assert all(planned < without - 0.04 for _, planned in levelled)
        assert np.mean([planned for _, planned in levelled]) < 1.03 + 0.1 * (case.per_node == 1)


@pytest.mark.parametrize(
    "case", [NODES, pytest.param(replace(HISTORY, options=SELECTIVE), marks=pytest.mark.slow)], ids=["live", "history"]
)
def test_a_step_that_is_not_begun_has_no_old_copies(case: Case) -> None:
    """The optimizer's step drops standing copies."""
    for found in run_ranks(4, live_runs.against_plain, replace(case, begins=2)):
        same(found)
        assert min(found["standing"]) > 0


@pytest.mark.parametrize("mode", ["live", pytest.param("history", marks=pytest.mark.slow)])
def test_pipeline_stages_plan_for_themselves_without_replay(mode: str) -> None:
    """Micro-batches are in flight, activations are recomputed, and the first stage has no experts."""
    case = Case(
        mode=mode, expert_parallel=2, per_node=1, pipeline=2, num_layers=4,
        options={**FULL, "moe_layer_freq": [0, 0, 1, 1]},
    )  # fmt: skip
    found = run_ranks(4, live_runs.against_plain, case)
    assert [one["layers"] for one in found] == [0, 0, 2, 2]
    for one in found:
        same(one)
        assert one["begun"] == [False, *[one["layers"] > 0] * (STEPS - 1)]
        assert bool(one["standing"]) == (one["layers"] > 0)


def test_old_standing_copies_are_noticed() -> None:
    """The control of the test above."""
    case = replace(HISTORY, begins=2, sabotage="keep old standing copies")
    assert max(one["weights"] for one in run_ranks(4, live_runs.against_plain, case)) > 1e-3


@pytest.mark.parametrize(
    "case", [pytest.param(replace(LIVE, expert_parallel=2), marks=pytest.mark.slow), NODES], ids=["flash", "both"]
)
def test_dropped_gradients_of_copies_are_noticed(case: Case) -> None:
    found = run_ranks(4, live_runs.against_plain, replace(case, sabotage="drop gradients of copies"))
    assert max(one["weights"] for one in found) > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(HISTORY, marks=pytest.mark.slow),
        replace(HISTORY, options=FULL, moves=True, overlap=True),
        pytest.param(replace(HISTORY, options=SELECTIVE, expert_parallel=2, overlap=True), marks=pytest.mark.slow),
    ],
    ids=["none", "full, homes move", "selective, two replicas"],
)
def test_plans_from_past_steps_train_as_plain_megatron_does(case: Case) -> None:
    for found in run_ranks(4, live_runs.against_plain, case):
        same(found)
        assert found["begun"] == [False, *[True] * (STEPS - 1)], "nothing is known before the first step"
        assert min(found["standing"]) > 0
        assert (found["moves"] > 0) == case.moves
        ((static, planned),) = found["observed"]
        assert planned < static - 0.03
        assert found["memory"]["spare_slots"] == found["memory"]["transfers"] == 0


def test_dropped_gradients_of_standing_copies_are_noticed() -> None:
    case = replace(HISTORY, expert_parallel=2, sabotage="drop gradients of standing copies")
    assert max(one["weights"] for one in run_ranks(2, live_runs.against_plain, case)) > 1e-3
