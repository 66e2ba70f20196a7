import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.trace.routing import PolicySegments, RoutingTrace, id_dtype, narrow_ids


def fields(**changes):
    values = {
        "ids": np.zeros((6, 2, 1), dtype=np.uint8),
        "offsets": np.array([0, 2, 6]),
        "num_experts": 4,
        "recorded": None,
    }
    return {**values, **changes}


def test_a_trace_knows_its_sizes(full_trace):
    assert full_trace.shape == (50, 3, 4)
    assert full_trace.num_sequences == 3
    assert full_trace.length_of_sequence.tolist() == [20, 10, 20]
    assert full_trace.tokens_without_routing == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.zeros((0, 2, 1), dtype=np.uint8), "offsets": np.array([0, 0])}, "empty trace"),
        ({"ids": np.zeros((6, 2), dtype=np.uint8)}, r"\[tokens, layers, k\]"),
        ({"ids": np.zeros((6, 2, 1), dtype=np.int64)}, "must be uint8"),
        ({"num_experts": 257}, "must be uint16"),
        ({"ids": np.full((6, 2, 1), 4, dtype=np.uint8)}, "expert id 4 is out of range"),
        ({"ids": np.zeros((6, 2, 5), dtype=np.uint8)}, "5 experts per token"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 65_537}, "num_experts"),
        ({"offsets": np.array([0, 2, 5])}, "from 0 to 6"),
        ({"offsets": np.array([1, 2, 6])}, "from 0 to 6"),
        ({"offsets": np.array([0, 4, 2, 6])}, "must grow"),
        ({"offsets": np.array([0, 2, 2, 6])}, "must grow"),
        ({"offsets": np.array([0.0, 6.0])}, "int64"),
        ({"offsets": np.array([0])}, "at least 2"),
        ({"recorded": np.ones(5, dtype=np.bool_)}, r"bool \[6\]"),
        ({"recorded": np.ones(6, dtype=np.uint8)}, r"bool \[6\]"),
        ({"group_of_sequence": np.array([0])}, r"int64 \[2\]"),
        ({"group_of_sequence": np.array([0, -1])}, "negative"),
        ({"prompt_length_of_sequence": np.array([3, 0])}, "longer than its sequence"),
        (
            {"segments": PolicySegments(offsets=np.array([0, 5]), version_of_segment=np.array([1]))},
            "segment offsets must run from 0 to 6",
        ),
    ],
)
def test_what_cannot_be_a_trace_is_refused(changes, message):
    RoutingTrace(**fields())
    with pytest.raises(InputError, match=message):
        RoutingTrace(**fields(**changes))


def test_ids_of_tokens_without_routing_mean_nothing():
    ids = np.zeros((6, 2, 1), dtype=np.uint8)
    ids[3] = 255
    recorded = np.ones(6, dtype=np.bool_)
    with pytest.raises(InputError, match="255"):
        RoutingTrace(**fields(ids=ids))
    recorded[3] = False
    assert RoutingTrace(**fields(ids=ids, recorded=recorded)).tokens_without_routing == 1


def test_segments_need_a_version_each():
    with pytest.raises(InputError, match="2 segments need as many versions"):
        PolicySegments(offsets=np.array([0, 1, 2]), version_of_segment=np.array([1]))


def test_id_types():
    assert id_dtype(256) == np.uint8
    assert id_dtype(257) == np.uint16


def test_minus_one_means_not_recorded():
    ids = np.array([[[1, 2], [3, 0]], [[-1, -1], [-1, -1]]], dtype=np.int16)
    narrow, recorded = narrow_ids(ids, 4)
    assert narrow.dtype == np.uint8
    assert recorded.tolist() == [True, False]
    assert narrow.tolist() == [[[1, 2], [3, 0]], [[0, 0], [0, 0]]]
    ids[1, 0, 0] = 2
    with pytest.raises(InputError, match="-1 is out of range"):
        narrow_ids(ids, 4)


def test_wide_ids_are_checked_before_they_are_cut():
    with pytest.raises(InputError, match="258 is out of range"):
        narrow_ids(np.full((1, 1, 1), 258, dtype=np.int64), 4)


def test_ids_may_stay_in_a_memory_mapped_file(tmp_path):
    np.zeros((6, 2, 1), dtype=np.uint8).tofile(tmp_path / "ids")
    ids = np.memmap(tmp_path / "ids", dtype=np.uint8, mode="r", shape=(6, 2, 1))
    assert RoutingTrace(**fields(ids=ids)).num_tokens == 6
