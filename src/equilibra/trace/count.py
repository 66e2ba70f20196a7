"""Loads from routing: how many tokens each expert gets, for groups of consecutive tokens.

Symbols: T tokens, S sequences, M micro-batches, G groups (each a sequence or a micro-batch), L layers, K experts per
token, E experts.

One kernel walks the ids once, in file order, and counts. It does not check bounds: every piece of ids is checked
before. Loads are returned a block of groups at a time, so memory is bounded whatever the number of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.core.errors import InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import SequenceLoad
from equilibra.trace.routing import check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from equilibra.trace.routing import Ids, Recording

__all__ = ["loads_of_groups", "micro_batches_in_file_order", "require_distinct_experts", "sequence_loads"]

BLOCK_BYTES = 64 << 20
ALL_RECORDED = np.zeros(0, dtype=np.bool_)


def loads_of_groups(
    recording: Recording, token_offsets: NDArray[np.int64], *, groups_per_block: int | None = None
) -> Iterator[NDArray[np.int32]]:
    """Yield [G, L, E] loads of consecutive groups; group g is tokens token_offsets[g] to token_offsets[g + 1]."""
    _check_group_sizes(recording, token_offsets)
    num_groups = len(token_offsets) - 1
    _, num_layers, _ = recording.shape
    block = groups_per_block or max(1, BLOCK_BYTES // (4 * num_layers * recording.num_experts))
    first_group, after = 0, min(block, num_groups)
    counts = np.zeros((after, num_layers, recording.num_experts), dtype=np.int32)
    for piece in recording.pieces():
        check_ids(piece.ids, recording.num_experts, piece.recorded)
        ids = np.ascontiguousarray(piece.ids)
        recorded = ALL_RECORDED if piece.recorded is None else np.ascontiguousarray(piece.recorded)
        start, stop = piece.first_token, piece.first_token + len(ids)
        while start < stop:
            end = min(stop, int(token_offsets[after]))
            _count(ids, recorded, token_offsets, piece.first_token, start, end, first_group, counts)
            start = end
            if end == token_offsets[after]:
                yield counts
                first_group, after = after, min(after + block, num_groups)
                counts = np.zeros((after - first_group, *counts.shape[1:]), dtype=np.int32)


def _check_group_sizes(recording: Recording, token_offsets: NDArray[np.int64]) -> None:
    sizes = np.diff(token_offsets)
    if len(sizes) < 1 or token_offsets[0] != 0 or token_offsets[-1] != recording.num_tokens or sizes.min() < 1:
        raise InputError(
            f"groups must cover tokens 0 to {recording.num_tokens} in order, none empty; "
            f"got {len(sizes)} from {token_offsets[0]} to {token_offsets[-1]}"
        )
    if int(sizes.max()) * recording.top_k > np.iinfo(np.int32).max:
        raise InputError(f"cannot count a group of {sizes.max()} tokens in int32; split it")


@kernel
def _count(
    ids: Ids,
    recorded: NDArray[np.bool_],
    token_offsets: NDArray[np.int64],
    first_token: int,
    start: int,
    stop: int,
    first_group: int,
    counts: NDArray[np.int32],
) -> None:
    """Count tokens start to stop in counts[group - first_group]; ids[0] is token first_token."""
    _, num_layers, top_k = ids.shape
    group = np.searchsorted(token_offsets, start, side="right") - 1
    token = start
    while token < stop:
        end = min(stop, token_offsets[group + 1])
        row = counts[group - first_group]
        for t in range(token - first_token, end - first_token):
            if recorded.size != 0 and not recorded[t]:
                continue
            for layer in range(num_layers):
                for k in range(top_k):
                    row[layer, ids[t, layer, k]] += 1
        token = end
        group += 1


def sequence_loads(recording: Recording) -> SequenceLoad:
    """The load of each sequence."""
    (tokens_SLE,) = loads_of_groups(recording, recording.offsets, groups_per_block=recording.num_sequences)
    return SequenceLoad(tokens_SLE=tokens_SLE, length_of_sequence=recording.length_of_sequence)


def micro_batches_in_file_order(lengths: NDArray[np.int64], tokens_per_microbatch: int) -> NDArray[np.int64]:
    """[M + 1] sequence offsets of micro-batches: whole sequences in file order, up to the token budget.

    A sequence longer than the budget gets its own micro-batch. The last micro-batch may be short.
    """
    if tokens_per_microbatch < 1:
        raise InputError(f"tokens per micro-batch must be at least 1, not {tokens_per_microbatch}")
    ends = np.cumsum(lengths)
    offsets = [0]
    while offsets[-1] < len(lengths):
        done = int(ends[offsets[-1] - 1]) if offsets[-1] else 0
        fits = int(np.searchsorted(ends, done + tokens_per_microbatch, side="right"))
        offsets.append(max(fits, offsets[-1] + 1))
    return np.array(offsets, dtype=np.int64)


def require_distinct_experts(recording: Recording) -> None:
    """Raise InputError if a token goes to one expert twice in a layer, which marks a filler row."""
    repeats = 0
    for piece in recording.pieces():
        recorded = ALL_RECORDED if piece.recorded is None else np.ascontiguousarray(piece.recorded)
        repeats += _tokens_with_repeats(np.ascontiguousarray(piece.ids), recorded)
    if repeats:
        raise InputError(
            f"{repeats} of {recording.num_tokens} tokens go to one expert twice in a layer: "
            "they are filler rows; mark them as not recorded"
        )


@kernel
def _tokens_with_repeats(ids: Ids, recorded: NDArray[np.bool_]) -> Any:  # noqa: ANN401 - numba integer
    num_tokens, num_layers, top_k = ids.shape
    tokens = 0
    for t in range(num_tokens):
        if recorded.size != 0 and not recorded[t]:
            continue
        repeats = 0
        for layer in range(num_layers):
            for k in range(1, top_k):
                for j in range(k):
                    repeats += ids[t, layer, k] == ids[t, layer, j]
        tokens += repeats > 0
    return tokens
