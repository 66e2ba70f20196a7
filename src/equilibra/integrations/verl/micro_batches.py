"""Sequences spread over a rank's micro-batches, so that no micro-batch has the same hot experts throughout.

Symbols: S sequences, L layers, E experts.

verl makes the micro-batches: how many there are on all data-parallel ranks, the token limit, their order. Then
sequences of like cost are swapped between micro-batches of this rank (`plan/spread.py`), where that brings the load of
every expert-parallel rank closer to its share and keeps the limit. All processes that hold the same sequences (tensor,
context and pipeline parallelism) find the same. With planned copies it brings nothing that could be measured
(`benchmarks/verl_micro_batches.py`), so it is off unless asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import contiguous
from equilibra.integrations.executor.counts import count_routing
from equilibra.plan.pack import DENSE_COST
from equilibra.plan.spread import spread_experts

if TYPE_CHECKING:
    from equilibra.integrations.verl.engine import BalancedEngine

__all__ = ["loads_of", "spread", "spread_partitions"]

LIKE = 0.05
"""sequences whose costs differ by less than this share of a mean sequence may be swapped"""


def spread(
    balanced: BalancedEngine, batch: Any, max_token_len: int, made: tuple[Any, Any], *, force_group_size: int = 1  # noqa: ANN401
) -> tuple[Any, Any]:  # fmt: skip
    """What `rearrange_micro_batches` returned, with sequences swapped; as it was where groups must stay together."""
    micro_batches, partitions = made
    if force_group_size > 1 or len(partitions) < 2 or not batch["routed_experts"].is_nested:
        return made
    sequences = loads_of(batch["routed_experts"], batch["input_ids"], balanced.balancer.num_experts)
    cluster = balanced.balancer.group.cluster
    changed = spread_partitions(sequences, cluster, partitions, max_token_len)
    return [
        micro_batch if new == old else balanced.verl.tu.index_select_tensor_dict(batch, new)
        for micro_batch, old, new in zip(micro_batches, partitions, changed, strict=True)
    ], changed


def loads_of(routed: Any, input_ids: Any, num_experts: int) -> SequenceLoad:  # noqa: ANN401 - jagged tensors
    """Counts of every sequence in all layers that were recorded; those of other pipeline stages too."""
    layers, top_k = routed.shape[2:]
    by_sequence = [[part[:, layer] for layer in range(layers)] for part in routed.cpu().unbind()]
    counts = count_routing(by_sequence, num_layers=layers, num_experts=num_experts, top_k=top_k)
    lengths = input_ids.offsets().diff().cpu().numpy().astype(np.int64)
    return SequenceLoad(tokens_SLE=counts, length_of_sequence=lengths)


def spread_partitions(
    sequences: SequenceLoad, cluster: Cluster, partitions: list[list[int]], max_token_len: int
) -> list[list[int]]:
    """Lists of sequences, one for each micro-batch, with as many in each as before, and never above the limit."""
    micro_batch_of_sequence: NDArray[np.int64] = np.empty(sequences.num_sequences, np.int64)
    for micro_batch, members in enumerate(partitions):
        micro_batch_of_sequence[members] = micro_batch
    lengths = sequences.length_of_sequence
    cost = DENSE_COST * lengths + lengths**2
    homes = contiguous(cluster, num_layers=sequences.num_layers, num_experts=sequences.num_experts)
    in_steps = cost // max(int(LIKE * cost.mean()), 1)
    spread_experts(sequences, homes, micro_batch_of_sequence, in_steps, len(partitions), 1, max_token_len)
    return [np.flatnonzero(micro_batch_of_sequence == m).tolist() for m in range(len(partitions))]
