"""A small recording with every optional field, and the folder of real ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from equilibra.trace.routing import PolicySegments, RoutingTrace


@pytest.fixture
def full_trace() -> RoutingTrace:
    rng = np.random.default_rng(7)
    ids = np.argsort(rng.random((50, 3, 16)), axis=-1)[..., :4].astype(np.uint8)
    recorded = np.ones(50, dtype=np.bool_)
    recorded[[19, 29, 49]] = False
    return RoutingTrace(
        ids=ids,
        offsets=np.array([0, 20, 30, 50]),
        num_experts=16,
        recorded=recorded,
        prompt_length_of_sequence=np.array([5, 0, 20]),
        group_of_sequence=np.array([4, 4, 9]),
        segments=PolicySegments(offsets=np.array([0, 12, 30, 50]), version_of_segment=np.array([6, 7, 7])),
    )


@pytest.fixture(scope="session")
def real_traces() -> Path:
    default = Path(__file__).resolve().parents[4] / "shared" / "traces"
    folder = Path(os.environ.get("EQUILIBRA_TRACES", default))
    if not (folder / "gpt-oss-20b.npz").is_file():
        pytest.skip(f"no real traces in {folder}; set EQUILIBRA_TRACES to the folder that holds gpt-oss-20b.npz")
    return folder


def assert_same(a, b) -> None:
    for name in ("offsets", "recorded", "prompt_length_of_sequence", "group_of_sequence"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or np.array_equal(left, right), name
    assert (a.segments is None) == (b.segments is None)
    if a.segments is not None:
        left, right = (np.repeat(s.version_of_segment, np.diff(s.offsets)) for s in (a.segments, b.segments))
        assert np.array_equal(left, right)
    assert a.num_experts == b.num_experts
    assert a.shape == b.shape
    for left, right in zip(a.pieces(), b.pieces(), strict=True):
        assert left.ids.dtype == right.ids.dtype
        assert np.array_equal(left.ids, right.ids)


@pytest.fixture
def same():
    return assert_same
