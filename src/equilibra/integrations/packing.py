"""Sequences of an optimizer step into micro-batches and ranks, for frameworks that take such an assignment. No torch.

Symbols: S sequences, M micro-batches, R data-parallel ranks, T tokens, L MoE layers, K experts per token, E experts.

    cells = pack_sequences(lengths, num_ranks=8, tokens_per_rank=8192, routes=routes_of(routing, 128, cluster))
    mine = [cells[m][rank] for m in range(len(cells))]              # numbers of this rank's sequences, by micro-batch

Ranks exchange tokens in every MoE layer, so they wait for each other in every micro-batch: see `plan/pack.py`. Where
routing is known, sequences with the same hot experts go to different micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.plan.pack import pack


class Routes(NamedTuple):
    """Expert load of sequences."""

    tokens_SLE: NDArray[np.int32]
    home: Placement
    """as the framework places experts"""


def routes_of(routing: Sequence[NDArray[Any]], num_experts: int, cluster: Cluster) -> Routes:
    """The load of sequences' recorded routing, [T, L, K] each, on contiguous homes. Negative ids are routed live."""
    num_layers = routing[0].shape[1] if len(routing) else 0
    tokens_SLE = np.zeros((len(routing), num_layers, num_experts), np.int32)
    for s, (tokens_LE, ids_TLK) in enumerate(zip(tokens_SLE, map(np.asarray, routing), strict=True)):
        if ids_TLK.ndim != 3 or ids_TLK.shape[1] != num_layers or ids_TLK.max(initial=0) >= num_experts:
            raise InputError(
                f"routing of sequence {s} must be [tokens, {num_layers}, k] with experts 0 to {num_experts - 1}, not "
                f"{list(ids_TLK.shape)} with {ids_TLK.max(initial=0)}"
            )
        for layer, tokens_E in enumerate(tokens_LE):
            ids = ids_TLK[:, layer].ravel()
            tokens_E[:] = np.bincount(ids[ids >= 0], minlength=num_experts)
    return Routes(tokens_SLE, contiguous(cluster, num_layers=num_layers, num_experts=num_experts))


def pack_sequences(
    lengths: Sequence[int] | NDArray[np.int64], *, num_ranks: int, tokens_per_rank: int, multiple: int = 1,
    routes: Routes | None = None,
) -> list[list[list[int]]]:  # fmt: skip
    """For every micro-batch and rank the numbers of its sequences; the same wherever the arguments are the same.

    lengths: tokens of every sequence of all data-parallel ranks. tokens_per_rank: budget of a rank in a micro-batch.
    multiple: the number of micro-batches must be a multiple of it (interleaved pipelines). routes: see `routes_of`.
    """
    tokens_SLE = np.zeros((len(lengths), 1, 1), np.int32) if routes is None else routes.tokens_SLE
    loads = SequenceLoad(tokens_SLE=tokens_SLE, length_of_sequence=np.asarray(lengths, np.int64))
    schedule, least = None, multiple
    while schedule is None or schedule.num_micro_batches % multiple:
        schedule = pack(
            loads, Cluster(num_nodes=1, ranks_per_node=num_ranks), tokens_per_rank=tokens_per_rank,
            home=None if routes is None else routes.home, least_micro_batches=least,
        )  # fmt: skip
        least = -(-schedule.num_micro_batches // multiple) * multiple
    cells: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(schedule.num_micro_batches)]
    for s, (m, rank) in enumerate(zip(schedule.micro_batch_of_sequence, schedule.rank_of_sequence, strict=True)):
        cells[m][rank].append(s)
    return cells
