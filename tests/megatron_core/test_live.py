"""Without replay, planned from what a router has just chosen or from past steps, training stays the same."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import live_runs
from tests.megatron_core.gpt_runs import FULL, SELECTIVE


@pytest.mark.parametrize("options", [{}, FULL, SELECTIVE], ids=["none", "full", "selective"])
def test_live_plans_train_as_plain_megatron_does(options: dict[str, Any]) -> None:
    for found in run_ranks(4, live_runs.against_plain, options, 2):
        np.testing.assert_allclose(found["balanced"], found["plain"], rtol=2e-6)
        assert found["weights"] < 2e-5
        assert found["copies"] > 0
        assert found["planned"] < 1.1 < found["static"]
        assert found["again"] == (1.0, 1.0)
        assert "every forward plans itself" in found["said"]


def test_dropped_gradients_of_copies_are_noticed() -> None:
    found = run_ranks(2, live_runs.against_plain, {}, 2, "drop gradients of copies")
    assert max(one["weights"] for one in found) > 1e-3


@pytest.mark.parametrize(
    ("options", "expert_parallel", "given"),
    [
        pytest.param({}, 4, {}, marks=pytest.mark.slow),
        (FULL, 4, {"moves": True, "overlap": True}),
        (SELECTIVE, 2, {"overlap": True}),
    ],
    ids=["none", "full, homes move", "selective, two replicas"],
)
def test_plans_from_past_steps_train_as_plain_megatron_does(
    options: dict[str, Any], expert_parallel: int, given: dict[str, bool]
) -> None:
    for found in run_ranks(4, history_of(given), options, expert_parallel):
        np.testing.assert_allclose(found["balanced"], found["plain"], rtol=2e-6)
        assert found["weights"] < 2e-5
        assert found["first"] is None, "nothing is known before the first step"
        assert min(found["standing"]) > 0
        assert (found["moves"] > 0) == given.get("moves", False)
        assert found["planned"] < found["static"] - 0.03
        assert found["memory"]["spare_slots"] == found["memory"]["transfers"] == 0


def history_of(given: dict[str, bool]) -> Any:
    return partial(live_runs.history_against_plain, **given)


def test_dropped_gradients_of_standing_copies_are_noticed() -> None:
    found = run_ranks(2, live_runs.history_against_plain, {}, 2, "drop gradients of standing copies")
    assert max(one["weights"] for one in found) > 1e-3
