"""`verify` runs a user's own micro-batches with and without us: rounding, or the parameter that is wrong."""

from dataclasses import replace

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.megatron_core import verify_runs
from tests.megatron_core.gpt_runs import FULL, Case

KINDS = ["losses and outputs", "gradients of experts", "gradients of routers", "gradients of other weights"]


def of_rounding(found: list[dict], below: float) -> None:
    assert all(one["differences"] == found[0]["differences"] for one in found)
    assert [one["said"] for one in found[1:]] == [[]] * (len(found) - 1)
    for one in found:
        assert one["error"] == ""
        assert one["copies"] > 0
    assert [one.what for one in found[0]["differences"]] == KINDS * 2
    for one in found[0]["differences"]:
        assert one.found <= one.allowed < below
    assert all(one.found > 0 for one in found[0]["differences"] if "experts" in one.what), "nothing was compared"


BFLOAT16 = {"bf16": True, "params_dtype": torch.bfloat16}
MOVED = Case(expert_parallel=4, homes="planned", options=FULL)
REPLICAS = Case(homes="shuffled", per_node=1, options=FULL)
"""two expert ranks that are two nodes, twice: homes move between them"""


@pytest.mark.arithmetic
@pytest.mark.parametrize("case", [Case(), Case(options=FULL, overlap=True, gather=True)], ids=["plain", "overlapped"])
def test_balancing_changes_rounding_only(case: Case) -> None:
    found = run_ranks(2, verify_runs.verified, case)
    of_rounding(found, 2e-6)
    first, table, *_ = found[0]["said"]
    assert "under the plan with 6 copies and 0 moved homes" in first
    assert "MORE THAN ROUNDING" not in table


@pytest.mark.arithmetic
def test_homes_that_move_take_the_gradients_of_the_pass_without_us_along() -> None:
    """Twice: the second time they first go back to where plain Megatron puts them."""
    found = run_ranks(4, verify_runs.verified, MOVED)
    of_rounding(found, 2e-6)
    assert all(one["moves"] > 2 for one in found)


@pytest.mark.arithmetic
def test_homes_that_move_beside_replicas() -> None:
    """Every replica reduces a part of a gradient, and the parts are put together. gloo reduces all of it everywhere."""
    for one in run_ranks(4, verify_runs.verified, REPLICAS):
        assert one["error"] == ""
        assert one["moves"] > 2
        assert all(of_kind.is_rounding for of_kind in one["differences"])


@pytest.mark.arithmetic
def test_bfloat16_rounds_more() -> None:
    of_rounding(run_ranks(2, verify_runs.verified, Case(options=BFLOAT16)), 0.1)


@pytest.mark.parametrize(
    "case",
    [
        Case(sabotage="drop gradients of copies"),
        Case(sabotage="drop gradients of copies", options=BFLOAT16),
        replace(MOVED, sabotage="leave gradients behind"),
    ],
    ids=["dropped", "dropped in bfloat16", "left behind by homes"],
)
def test_what_is_wrong_is_named(case: Case) -> None:
    found = run_ranks(4 if case.homes != "stay" else 2, verify_runs.verified, case)
    for one in found:
        assert one["error"].startswith(
            "MismatchError: balancing changes this run's numbers by more than rounding, most"
        )
        assert "decoder.layers." in one["error"]
        assert ".mlp.experts." in one["error"]
        assert "router" not in one["error"]
    _, table = found[0]["said"]
    (row,) = [line for line in table.splitlines() if "MORE THAN ROUNDING" in line]
    assert row.startswith("gradients of experts")


def test_what_cannot_be_verified() -> None:
    for live, dropout in run_ranks(2, verify_runs.refused):
        assert "cannot verify with mode='live': routers choose anew in every pass" in live
        assert "cannot verify with hidden_dropout=0.1" in dropout
