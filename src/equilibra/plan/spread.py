"""Spread: swap sequences between micro-batches so that none has the same hot experts throughout.

Symbols: S sequences, M micro-batches, L layers, D folded sums; a bin is a node, or a rank where there is one node.

Skew is the sum of squares, over micro-batches, layers and bins, of a bin's load around its mean. Sequences of similar
length are swapped where that lowers the skew, fits the budgets, and slows no micro-batch down. Layers and bins are
folded into D sums with random signs, which keep squares on average, so a swap costs D operations for any model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import kernel
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import Placement

__all__ = ["spread_experts"]

_SWEEPS = 6
_WINDOW = 24
_FOLDED = 64


def spread_experts(
    sequences: SequenceLoad,
    home: Placement,
    cell_of_sequence: NDArray[np.int64],
    cost: NDArray[np.int64],
    num_micro_batches: int,
    num_cells: int,
    budget: int,
) -> None:
    """Swap sequences between micro-batches where that lowers the skew of the experts' loads."""
    skew_SD = _folded_skew(sequences, home)
    order = np.argsort(sequences.length_of_sequence, kind="stable")
    _swap_alike(
        skew_SD, sequences.length_of_sequence.astype(np.int64), cost, order, cell_of_sequence,
        num_micro_batches, num_cells, budget,
    )  # fmt: skip


def _folded_skew(sequences: SequenceLoad, home: Placement) -> NDArray[np.float64]:
    """[S, D] how far each sequence pushes every (layer, bin) above its share, folded; products are exact in float64."""
    cluster = home.cluster
    per_bin = cluster.ranks_per_node if cluster.num_nodes > 1 else 1
    num_bins = cluster.num_ranks // per_bin
    shape = (sequences.num_layers, num_bins, _FOLDED)
    signs_LBD: NDArray[np.float64]
    if sequences.num_layers * num_bins <= _FOLDED:
        signs_LBD = np.eye(sequences.num_layers * num_bins, _FOLDED).reshape(shape)
    else:
        signs_LBD = np.random.default_rng(0).choice([-1.0, 1.0], shape)
    folded = np.zeros((sequences.num_sequences, _FOLDED))
    for layer in range(sequences.num_layers):
        in_bin_EB = (home.home_of_expert[layer] // per_bin)[:, None] == np.arange(num_bins)
        load_SB = sequences.tokens_SLE[:, layer].astype(np.float64) @ in_bin_EB
        folded += (num_bins * load_SB - load_SB.sum(axis=1, keepdims=True)) @ signs_LBD[layer]
    return np.rint(folded * (2.0**12 / max(float(np.abs(folded).max()), 1.0)))


@kernel
def _swap_alike(skew_SD, lengths, cost, order, cell_of_sequence, num_micro_batches, num_ranks, budget):  # type: ignore[no-untyped-def]
    num_sequences, width = skew_SD.shape
    used = np.zeros(num_micro_batches * num_ranks, np.int64)
    spent = np.zeros(num_micro_batches * num_ranks, np.int64)
    slowest = np.zeros(num_micro_batches, np.int64)
    skew_MD = np.zeros((num_micro_batches, width))
    for s in range(num_sequences):
        c = cell_of_sequence[s]
        used[c] += lengths[s]
        spent[c] += cost[s]
        for d in range(width):
            skew_MD[c // num_ranks, d] += skew_SD[s, d]
    for c in range(spent.size):
        slowest[c // num_ranks] = max(slowest[c // num_ranks], spent[c])
    for _ in range(_SWEEPS):
        swaps = 0
        for at in range(num_sequences):
            i = order[at]
            ci = cell_of_sequence[i]
            a = ci // num_ranks
            best = 0.0
            best_j = -1
            for k in range(max(at - _WINDOW, 0), min(at + _WINDOW + 1, num_sequences)):
                j = order[k]
                cj = cell_of_sequence[j]
                b = cj // num_ranks
                longer = lengths[j] - lengths[i]
                more = cost[j] - cost[i]
                if a == b or used[ci] + longer > budget or used[cj] - longer > budget:
                    continue
                if spent[ci] + more > slowest[a] or spent[cj] - more > slowest[b]:
                    continue
                change = 0.0  # of the sum of squares, halved
                for d in range(width):
                    moved = skew_SD[j, d] - skew_SD[i, d]
                    change += moved * (skew_MD[a, d] - skew_MD[b, d] + moved)
                if change < best:
                    best = change
                    best_j = j
            if best_j >= 0:
                j = best_j
                cj = cell_of_sequence[j]
                b = cj // num_ranks
                used[ci] += lengths[j] - lengths[i]
                used[cj] -= lengths[j] - lengths[i]
                spent[ci] += cost[j] - cost[i]
                spent[cj] -= cost[j] - cost[i]
                cell_of_sequence[i] = cj
                cell_of_sequence[j] = ci
                for d in range(width):
                    skew_MD[a, d] += skew_SD[j, d] - skew_SD[i, d]
                    skew_MD[b, d] -= skew_SD[j, d] - skew_SD[i, d]
                swaps += 1
        if swaps == 0:
            break
