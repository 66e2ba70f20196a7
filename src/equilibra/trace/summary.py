"""What a recording holds, and how unbalanced it is on a cluster under static placement.

Symbols: T tokens, S sequences, M micro-batches, L layers, E experts, R ranks. Homes are contiguous (expert e on rank
e // (E / R)); micro-batches are whole sequences in file order, up to the token budget. The recording is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.events.imbalance import imbalance, spread
from equilibra.trace.count import loads_of_groups, micro_batches_in_file_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equilibra.core.cluster import Cluster
    from equilibra.trace.routing import Recording

__all__ = ["TraceSummary", "summarize"]


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Sizes and imbalances of a recording on a cluster; imbalance is slowest over mean."""

    tokens: int
    """T"""
    sequences: int
    """S"""
    layers: int
    """L"""
    experts: int
    """E"""
    top_k: int
    """experts per token"""
    tokens_without_routing: int
    """tokens that will be routed live"""
    groups: int | None
    """prompt groups; None: unknown"""
    policy_versions: int | None
    """distinct policy versions; None: unknown"""
    length_median: float
    """tokens per sequence, median"""
    length_p99: float
    """tokens per sequence, 99th percentile"""
    length_max: int
    """tokens of the longest sequence"""
    ranks: int
    """R"""
    nodes: int
    tokens_per_microbatch: int
    """token budget of a micro-batch"""
    microbatches: int
    """M"""
    imbalance_batch: float
    """imbalance of ranks over the whole batch, mean over layers"""
    imbalance_microbatch_mean: float
    """imbalance of ranks, mean over micro-batches and layers"""
    imbalance_microbatch_p99: float
    """imbalance of ranks, 99th percentile over micro-batches and layers"""
    imbalance_microbatch_worst: float
    """imbalance of ranks, largest over micro-batches and layers"""
    node_imbalance_batch: float
    """imbalance of nodes over the whole batch, mean over layers"""
    node_imbalance_microbatch_mean: float
    """imbalance of nodes, mean over micro-batches and layers"""
    worst_layer: int
    """layer with the largest imbalance over the whole batch"""
    imbalance_of_layer: tuple[float, ...]
    """[L] imbalance of ranks over the whole batch"""
    load_share_of_rank: tuple[float, ...]
    """[R] share of the worst layer's load; the mean is 1 / R"""


def summarize(recording: Recording, cluster: Cluster, tokens_per_microbatch: int) -> TraceSummary:
    """Sizes and imbalances of the recording on this cluster."""
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
