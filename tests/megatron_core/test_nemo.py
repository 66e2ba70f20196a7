"""NeMo-RL's passes learn the same under plans. NeMo-RL itself is not on PyPI: a stand-in keeps its order."""

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import nemo_runs
from tests.megatron_core.gpt_runs import FULL
from tests.megatron_core.nemo_runs import Case

from equilibra.core.errors import InputError
from equilibra.integrations.nemo_rl import training as nemo
from equilibra.integrations.planned import MegatronSetting

CASES = {
    "plain": Case(),
    "recompute": Case(options=FULL),
    "unrouted": Case(unrouted=0.2),
    "dropped": Case(sabotage="drop gradients of copies"),  # the last: it breaks the processes that it runs in
}


@pytest.fixture(scope="module")
def runs():
    found = run_ranks(2, nemo_runs.against_plain, CASES)
    return {name: [of_rank[name] for of_rank in found] for name in CASES}


@pytest.mark.parametrize("name", ["plain", "recompute", "unrouted"])
def test_passes_learn_the_same(runs, name):
    for one in runs[name]:
        assert len(one["plain"]) == 2 * 3 * 3  # steps, passes, micro-batches
        np.testing.assert_allclose(one["planned"], one["plain"], rtol=2e-6)
        assert one["weights"] < 2e-5


def test_ranks_compute_the_same_number_of_rows(runs):
    rows = np.array([one["rows"] for one in runs["plain"]]).reshape(2, 2, 3, -1)  # rank, step, pass, visit
    slowest_over_mean = rows.max(axis=0) / rows.mean(axis=0)
    assert slowest_over_mean[:, 1:].mean() < 1.05 < slowest_over_mean[:, 0].mean()  # the reference replays nothing
    metrics = runs["plain"][0]["metrics"]
    assert metrics["imbalance_after"] < 1.05 < metrics["imbalance_before"]


def test_the_comparison_notices(runs):
    assert max(one["weights"] for one in runs["dropped"]) > 1e-3


def test_it_is_installed_once_and_where_nemo_rl_is(monkeypatch):
    with pytest.raises(InputError, match="call install\\(\\) in a policy worker with the Megatron backend"):
        nemo.install()
    with pytest.raises(InputError, match="mode='live' needs no routing of a pass"):
        nemo.install(MegatronSetting(mode="live"))
    for name, module in nemo_runs.modules().items():
        monkeypatch.setitem(nemo_runs.sys.modules, name, module)
    nemo.install()
    with pytest.raises(InputError, match="planned already"):
        nemo.install()
    with pytest.raises(InputError, match="has no num_microbatches, forward_only"):
        nemo.PlannedPasses(lambda *_: [], MegatronSetting()).around(
            lambda model, data_iterator, use_router_replay: None
        )
