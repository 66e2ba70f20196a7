import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.trace import routing
from equilibra.trace.count import (
    loads_of_groups,
    micro_batches_in_file_order,
    require_distinct_experts,
    sequence_loads,
)
from equilibra.trace.routing import RoutingTrace


def slow_sequence_loads(trace):
    loads = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts), dtype=np.int32)
    for s in range(trace.num_sequences):
        for t in range(trace.offsets[s], trace.offsets[s + 1]):
            if trace.recorded is None or trace.recorded[t]:
                for layer in range(trace.num_layers):
                    for expert in trace.ids[t, layer]:
                        loads[s, layer, expert] += 1
    return loads


def test_counts_agree_with_the_slow_way(full_trace):
    loads = sequence_loads(full_trace)
    assert np.array_equal(loads.tokens_SLE, slow_sequence_loads(full_trace))
    assert loads.tokens_SLE[1].sum() == 9 * 3 * 4  # one of ten tokens has no routing
    assert loads.length_of_sequence.tolist() == [20, 10, 20]


def test_counts_do_not_depend_on_the_size_of_pieces_and_blocks(full_trace, monkeypatch):
    expected = slow_sequence_loads(full_trace)
    for piece_bytes in (1, 12 * 7, 12 * 20, 12 * 33):
        monkeypatch.setattr(routing, "PIECE_BYTES", piece_bytes)
        for groups_per_block in (1, 2, 3, 5):
            blocks = list(loads_of_groups(full_trace, full_trace.offsets, groups_per_block=groups_per_block))
            assert [len(block) for block in blocks[:-1]] == [groups_per_block] * (len(blocks) - 1)
            assert np.array_equal(np.concatenate(blocks), expected)


def test_wide_ids_are_counted():
    ids = np.array([[[299]], [[299]], [[0]]], dtype=np.uint16)
    loads = sequence_loads(RoutingTrace(ids=ids, offsets=np.array([0, 3]), num_experts=300))
    assert loads.tokens_SLE[0, 0, [0, 299]].tolist() == [1, 2]


def test_ids_changed_after_the_check_cannot_write_out_of_bounds(full_trace):
    full_trace.ids[0, 0, 0] = 200
    with pytest.raises(InputError, match="200 is out of range"):
        sequence_loads(full_trace)


@pytest.mark.parametrize(
    ("lengths", "budget", "offsets"),
    [
        ([3, 3, 3], 6, [0, 2, 3]),
        ([3, 3, 3], 5, [0, 1, 2, 3]),
        ([9, 1, 1, 9], 4, [0, 1, 3, 4]),
        ([5], 100, [0, 1]),
        ([1, 1, 1, 1], 4, [0, 4]),
    ],
)
def test_micro_batches_are_whole_sequences_in_order(lengths, budget, offsets):
    assert micro_batches_in_file_order(np.array(lengths), budget).tolist() == offsets


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        micro_batches_in_file_order(np.array([1]), 0)


def test_loads_of_micro_batches_are_sums_of_sequences(full_trace):
    (block,) = loads_of_groups(full_trace, full_trace.offsets[[0, 2, 3]])
    of_sequence = slow_sequence_loads(full_trace)
    assert np.array_equal(block, [of_sequence[0] + of_sequence[1], of_sequence[2]])


@pytest.mark.parametrize("token_offsets", [[0, 20], [0, 60], [5, 50], [0, 20, 20, 50], [0]])
def test_groups_that_do_not_cover_the_trace_are_refused(full_trace, token_offsets):
    with pytest.raises(InputError, match="groups must cover"):
        list(loads_of_groups(full_trace, np.array(token_offsets)))


def test_repeated_experts_are_counted_as_they_stand_and_refused_on_request(full_trace):
    require_distinct_experts(full_trace)
    full_trace.ids[19] = 0  # not recorded
    require_distinct_experts(full_trace)
    full_trace.ids[3, 1] = [5, 6, 7, 5]
    assert sequence_loads(full_trace).tokens_SLE[0].sum() == 19 * 3 * 4
    with pytest.raises(InputError, match="1 of 50 tokens go to one expert twice"):
        require_distinct_experts(full_trace)
