"""Sequences into micro-batches and ranks: all of them once, within budgets, and hot experts spread."""

import numpy as np
import pytest

from equilibra.core.errors import BudgetError, InputError
from equilibra.core.placement import Cluster
from equilibra.integrations.packing import pack_sequences, routes_of

CLUSTER = Cluster(num_nodes=1, ranks_per_node=4)


@pytest.mark.parametrize("multiple", [1, 4])
def test_every_sequence_has_one_cell_within_its_budget(multiple):
    lengths = np.random.default_rng(0).integers(10, 200, 60).tolist()
    cells = pack_sequences(lengths, num_ranks=4, tokens_per_rank=400, multiple=multiple)
    assert sorted(s for of_ranks in cells for cell in of_ranks for s in cell) == list(range(60))
    assert all(sum(lengths[s] for s in cell) <= 400 for of_ranks in cells for cell in of_ranks)
    assert {len(of_ranks) for of_ranks in cells} == {4}
    assert len(cells) % multiple == 0
    with pytest.raises(BudgetError):
        pack_sequences([500], num_ranks=4, tokens_per_rank=400)


def test_sequences_with_the_same_hot_experts_are_packed_apart():
    """Half of the sequences use the first rank's experts, the others the last's; in their order they come together."""
    rng, slowest = np.random.default_rng(0), {}
    routing = [rng.integers(0, 4, (50, 2, 2)) + 12 * (s >= 16) for s in range(32)]
    routes = routes_of(routing, 16, CLUSTER)
    assert routes.tokens_SLE.sum() == 32 * 50 * 2 * 2
    for name, given in (("known", routes), ("unknown", None)):
        cells = pack_sequences([50] * 32, num_ranks=4, tokens_per_rank=50, routes=given)
        loads = [routes.tokens_SLE[[s for cell in of_ranks for s in cell], 0].reshape(-1, 4, 4) for of_ranks in cells]
        slowest[name] = sum(load.sum(axis=(0, 2)).max() for load in loads)
    assert slowest["known"] < slowest["unknown"]


def test_routing_of_another_model_is_refused():
    with pytest.raises(InputError, match="routing of sequence 1 must be"):
        routes_of([np.zeros((3, 2, 2), int), np.full((3, 2, 2), 16)], 16, CLUSTER)
