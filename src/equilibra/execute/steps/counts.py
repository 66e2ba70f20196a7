"""What all ranks must know to plan: lengths and loads of all sequences. Counts are gathered, routing ids never are.

Symbols: S sequences of all ranks, L layers, E experts. A sequence's number is its place when the ranks' own sequences
are laid one after another, by rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, check_mini_batches
from equilibra.core.visit import signed_ids
from equilibra.execute.group import ExpertGroup
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import RoutingTrace

__all__ = ["StepCounts", "check_routing", "gather_counts", "recorded_experts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCounts:
    """All ranks' sequences, as counts."""

    sequences: SequenceLoad
    """loads and lengths"""
    unrecorded_of_sequence: NDArray[np.int64]
    """[S] tokens whose routing was not recorded, or cannot be replayed"""
    mini_batch_of_sequence: NDArray[np.int64]
    """[S] the optimizer step each is for"""
    first_of_rank: NDArray[np.int64]
    """[world + 1] number of the first sequence of each rank"""

    @property
    def rank_of_sequence(self) -> NDArray[np.int64]:
        """[S] the world rank that has each sequence."""
        return np.repeat(np.arange(self.first_of_rank.size - 1), np.diff(self.first_of_rank))


def recorded_experts(routing: RoutingTrace) -> NDArray[np.signedinteger]:
    """[T, L, K] experts to replay; -1 for tokens without recorded routing, or with one expert twice in a layer.

    Such a row is a filler: no router chooses an expert twice.
    """
    experts = routing.ids.astype(signed_ids(routing.num_experts))
    ordered = np.sort(experts, axis=2)
    live = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
    if routing.recorded is not None:
        live |= ~routing.recorded
    experts[live] = -1
    return experts


def check_routing(
    routing: RoutingTrace | None, mini_batches: NDArray[np.integer], *, num_layers: int, num_experts: int, top_k: int
) -> None:
    """An error if the routing is of another model, or its sequences have no mini-batch each."""
    num_sequences = 0 if routing is None else routing.length_of_sequence.size
    check_mini_batches(mini_batches, num_sequences, complete=False)
    if routing is not None:
        found, required = (*routing.shape[1:], routing.num_experts), (num_layers, top_k, num_experts)
        if found != required:
            raise InputError(
                f"the routing has {found[0]} layers with {found[1]} of {found[2]} experts per token, the model "
                f"{required[0]} with {required[1]} of {required[2]}"
            )


def gather_counts(
    group: ExpertGroup,
    routing: RoutingTrace | None,
    experts_TLK: NDArray[np.signedinteger],
    mini_batches: NDArray[np.integer],
    *,
    num_layers: int,
    num_experts: int,
) -> StepCounts:
    """Collective: every rank gives its own sequences (None: it has none) and gets the counts of all.

    mini_batches: one number per own sequence.
    """
    mine = np.zeros((0, 3), np.int64)
    loads = np.zeros((0, num_layers, num_experts), np.int32)
    if routing is not None:
        live_T = experts_TLK[:, 0, 0] < 0
        known = RoutingTrace(
            ids=routing.ids,
            offsets=routing.offsets,
            num_experts=num_experts,
            recorded=~live_T if live_T.any() else None,
        )
        loads = sequence_loads(known).tokens_SLE
        unrecorded = np.add.reduceat(live_T.astype(np.int64), routing.offsets[:-1])
        mine = np.stack([routing.length_of_sequence, unrecorded, mini_batches.astype(np.int64)], axis=1)
    every = group.gather(mine, what="gathering lengths of sequences")
    lengths, unrecorded_of_sequence, mini_batch_of_sequence = np.concatenate(every).astype(np.int64).T.copy()
    if lengths.size == 0:
        raise InputError("no rank has any sequence: there is nothing to plan")
    check_mini_batches(mini_batch_of_sequence, lengths.size)
    narrow = np.uint16 if lengths.max() < 2**16 else np.int32
    gathered = group.gather(loads.astype(narrow), what="gathering counts of routing")
    return StepCounts(
        sequences=SequenceLoad(tokens_SLE=np.concatenate(gathered).astype(np.int32), length_of_sequence=lengths),
        unrecorded_of_sequence=unrecorded_of_sequence,
        mini_batch_of_sequence=mini_batch_of_sequence,
        first_of_rank=np.concatenate([[0], np.cumsum([len(part) for part in every])]),
    )
