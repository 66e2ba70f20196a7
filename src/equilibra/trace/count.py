"""Loads from routing: how many tokens each expert gets, and how unbalanced that is under static placement.

Symbols: T tokens, S sequences, M micro-batches, G groups (each a sequence or a micro-batch), L layers, K experts per
token, E experts, R ranks.

One kernel walks the ids once, in file order, and counts. It does not check bounds: every piece of ids is checked
before. Loads are returned a block of groups at a time, so memory is bounded whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import SequenceLoad, imbalance, spread
from equilibra.core.placement import Cluster
from equilibra.trace.routing import Recording, check_ids

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
def _count(ids, recorded, token_offsets, first_token, start, stop, first_group, counts):  # type: ignore[no-untyped-def]
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
    """[M + 1] offsets of micro-batches: whole sequences in file order up to the budget, a longer one alone."""
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
def _tokens_with_repeats(ids, recorded):  # type: ignore[no-untyped-def]
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


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Sizes and imbalances of a recording on a cluster.

    Lengths are in tokens per sequence. Imbalance is slowest over mean, of ranks unless the name says nodes; for the
    batch it is a mean over layers, for micro-batches its statistics are over micro-batches and layers.
    """

    tokens: int
    sequences: int
    layers: int
    experts: int
    top_k: int
    tokens_without_routing: int
    """tokens that will be routed live"""
    groups: int | None
    """prompt groups; None: unknown"""
    policy_versions: int | None
    """distinct policy versions; None: unknown"""
    length_median: float
    length_p99: float
    length_max: int
    ranks: int
    nodes: int
    tokens_per_microbatch: int
    """token budget of a micro-batch"""
    microbatches: int
    imbalance_batch: float
    imbalance_microbatch_mean: float
    imbalance_microbatch_p99: float
    imbalance_microbatch_worst: float
    node_imbalance_batch: float
    node_imbalance_microbatch_mean: float
    worst_layer: int
    """layer with the largest imbalance over the whole batch"""
    imbalance_of_layer: tuple[float, ...]
    """[L] imbalance of ranks over the whole batch"""
    load_share_of_rank: tuple[float, ...]
    """[R] share of the worst layer's load; the mean is 1 / R"""


def summarize(recording: Recording, cluster: Cluster, tokens_per_microbatch: int) -> TraceSummary:
    """Sizes of the recording, and its imbalances on this cluster with contiguous homes.

    Micro-batches are whole sequences in file order, up to the token budget. The recording is read once.
    """
    lengths, groups, segments = recording.length_of_sequence, recording.group_of_sequence, recording.segments
    micro_batches = micro_batches_in_file_order(lengths, tokens_per_microbatch)
    return TraceSummary(
        tokens=recording.num_tokens,
        sequences=recording.num_sequences,
        layers=recording.num_layers,
        experts=recording.num_experts,
        top_k=recording.top_k,
        tokens_without_routing=recording.tokens_without_routing,
        groups=None if groups is None else len(np.unique(groups)),
        policy_versions=None if segments is None else len(np.unique(segments.version_of_segment)),
        length_median=float(np.median(lengths)),
        length_p99=float(np.percentile(lengths, 99)),
        length_max=int(lengths.max()),
        ranks=cluster.num_ranks,
        nodes=cluster.num_nodes,
        tokens_per_microbatch=tokens_per_microbatch,
        microbatches=len(micro_batches) - 1,
        **_imbalances(recording, cluster, recording.offsets[micro_batches]),
    )


def _imbalances(recording: Recording, cluster: Cluster, token_offsets: NDArray[np.int64]) -> dict[str, Any]:
    """The fields that need the ids; micro-batch m is tokens token_offsets[m] to token_offsets[m + 1]."""
    experts_per_rank = cluster.experts_per_rank(recording.num_experts)
    total = np.zeros((recording.num_layers, cluster.num_ranks), dtype=np.int64)
    of_ranks, of_nodes = [], []
    for tokens_MLE in loads_of_groups(recording, token_offsets):
        by_home = tokens_MLE.reshape(*tokens_MLE.shape[:2], cluster.num_ranks, experts_per_rank)
        load = by_home.sum(axis=-1, dtype=np.int64)
        total += load.sum(axis=0)
        of_ranks.append(imbalance(load))
        of_nodes.append(imbalance(_by_node(load, cluster)))
    over_ranks, of_layer = spread(np.concatenate(of_ranks)), imbalance(total)
    worst = int(of_layer.argmax())
    return {
        "imbalance_batch": float(of_layer.mean()),
        "imbalance_microbatch_mean": over_ranks.mean,
        "imbalance_microbatch_p99": over_ranks.p99,
        "imbalance_microbatch_worst": over_ranks.worst,
        "node_imbalance_batch": float(imbalance(_by_node(total, cluster)).mean()),
        "node_imbalance_microbatch_mean": float(np.concatenate(of_nodes).mean()),
        "worst_layer": worst,
        "imbalance_of_layer": tuple(of_layer.tolist()),
        "load_share_of_rank": tuple((total[worst] / max(1, total[worst].sum())).tolist()),
    }


def _by_node(load: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """[..., N] load of each node from load [..., R]."""
    by_node: NDArray[np.int64] = load.reshape(*load.shape[:-1], cluster.num_nodes, cluster.ranks_per_node).sum(axis=-1)
    return by_node
