"""Without replay every forward is planned from what its router has just chosen, and training stays the same."""

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
