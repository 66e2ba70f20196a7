"""Whatever the recording: counts agree with the slow way, files give back what they got, damage is noticed."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibra.core.errors import TraceFormatError
from equilibra.core.load import imbalance
from equilibra.trace.count import loads_of_groups, micro_batches_in_file_order, sequence_loads
from equilibra.trace.open import load_trace, save_trace
from equilibra.trace.routing import RoutingTrace, id_dtype
from equilibra.trace.store import write_trace

relaxed = settings(deadline=None, max_examples=60)


@st.composite
def traces(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    layers, top_k, experts = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([4, 5, 256, 257, 700])),
    )
    tokens = sum(lengths)
    ids = rng.integers(0, experts, size=(tokens, layers, top_k)).astype(id_dtype(experts))
    return RoutingTrace(
        ids=ids,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        num_experts=experts,
        recorded=rng.random(tokens) < 0.7 if draw(st.booleans()) else None,
        group_of_sequence=rng.integers(0, 3, size=len(lengths)) if draw(st.booleans()) else None,
    )


def slow_loads(trace):
    recorded = np.ones(trace.num_tokens, dtype=np.bool_) if trace.recorded is None else trace.recorded
    loads = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts), dtype=np.int64)
    sequence = np.repeat(np.arange(trace.num_sequences), trace.length_of_sequence)
    for t in np.flatnonzero(recorded):
        for layer in range(trace.num_layers):
            np.add.at(loads[sequence[t], layer], trace.ids[t, layer], 1)
    return loads


@relaxed
@given(traces(), st.integers(1, 9))
def test_counts_agree_with_the_slow_way(trace, groups_per_block):
    expected = slow_loads(trace)
    assert np.array_equal(sequence_loads(trace).tokens_SLE, expected)
    blocks = list(loads_of_groups(trace, trace.offsets, groups_per_block=groups_per_block))
    assert np.array_equal(np.concatenate(blocks), expected)


@relaxed
@given(traces(), st.sampled_from(["a.npz", "a.eqtrace"]))
def test_files_give_back_what_was_put_in(trace, name):
    with tempfile.TemporaryDirectory() as folder:
        save_trace(trace, Path(folder) / name)
        back = load_trace(Path(folder) / name)
        assert back.num_experts == trace.num_experts
        assert np.array_equal(np.concatenate([piece.ids for piece in back.pieces()]), trace.ids)
        assert np.array_equal(back.offsets, trace.offsets)
        assert back.tokens_without_routing == trace.tokens_without_routing
        assert (back.group_of_sequence is None) == (trace.group_of_sequence is None)
        assert np.array_equal(sequence_loads(back).tokens_SLE, slow_loads(trace))


@relaxed
@given(traces(), st.integers(1, 40), st.integers(0, 2**20), st.integers(1, 255))
def test_a_changed_byte_of_a_stored_trace_is_always_noticed(trace, shard_bytes, where, change):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.eqtrace"
        write_trace(trace, path, shard_bytes=shard_bytes)
        files = sorted(file for file in path.iterdir() if file.suffix == ".bin")
        file = files[where % len(files)]
        content = bytearray(file.read_bytes())
        content[where % len(content)] ^= change
        file.write_bytes(content)
        with pytest.raises(TraceFormatError, match=file.name):
            sequence_loads(load_trace(path))


@relaxed
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_are_full_whole_and_in_order(lengths, budget):
    lengths = np.array(lengths)
    offsets = micro_batches_in_file_order(lengths, budget)
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    sizes = np.add.reduceat(lengths, offsets[:-1])
    alone = np.diff(offsets) == 1
    assert ((sizes <= budget) | alone).all()
    for m in range(len(sizes) - 1):
        assert sizes[m] + lengths[offsets[m + 1]] > budget


@relaxed
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_imbalance_is_from_one_to_the_number_of_ranks(load):
    assert 1.0 <= imbalance(np.array(load)) <= len(load) + 1e-9
