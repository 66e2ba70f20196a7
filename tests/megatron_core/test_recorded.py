"""On recorded routing over several nodes, and in memory: what Megatron executes is what our own runtime would."""

from pathlib import Path

import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import recorded_runs

from equilibra.events.schema import Kind


@pytest.mark.parametrize(("per_node", "most"), [(2, 1.02), (1, 1.06)])
def test_rows_are_as_even_as_in_our_own_runtime(traces: Path, per_node: int, most: float) -> None:
    for found in run_ranks(4, recorded_runs.rows_of_experts, traces, per_node, 2, 2):
        assert found["rows"] == 4 * 4 * recorded_runs.TOKENS * recorded_runs.MICRO_BATCHES * 3
        assert found["entered"] == pytest.approx(found["ours"], rel=0.005)
        assert found["entered"] < most < 1.15 < found["static"]
        assert found["standing"] > 0


def test_without_standing_copies_nodes_stay_uneven(traces: Path) -> None:
    """The control: the same measure sees what flash copies alone leave."""
    for found in run_ranks(4, recorded_runs.rows_of_experts, traces, 2, 2, 0):
        assert found["entered"] > 1.03


@pytest.mark.parametrize(("path", "prefetch"), [("collective", True), ("collective", False), ("host", True)])
def test_copies_take_the_spare_slots_and_no_more(path: str, prefetch: bool) -> None:
    """However many micro-batches are in flight, autograd keeps no weights of flash copies."""
    for found in run_ranks(4, recorded_runs.what_copies_take, path, prefetch):
        assert found["flash"] > 0
        assert found["standing"] > 0
        assert not any(found["kept"])
        banks = 2 if prefetch else 1
        assert found["memory"]["spare_slots"] == banks * 2 * found["row"]
        assert found["memory"]["standing_copies"] == 2 * found["held"] * found["row"]
        events = found["events"]
        assert events.get(Kind.STANDING_COPY, 0) == 0, "they were fetched in the forward of the first micro-batch"
        assert events.get(Kind.STANDING_GRADIENT, 0) == found["held"], "returned once, not for every micro-batch"
