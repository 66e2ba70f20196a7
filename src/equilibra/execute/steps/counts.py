"""What ranks exchange around a plan: counts of all sequences before it, sequences' data after it.

Symbols: S sequences of all ranks, T tokens, L layers, E experts, K experts per token. Sequences are numbered by rank,
then in the rank's own order. Counts are gathered; routing ids go only to the rank that runs their sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, check_mini_batches
from equilibra.core.visit import signed_ids
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The world ranks that own and that run each sequence."""

    owner_of_sequence: NDArray[np.int64]
    """[S]"""
    runner_of_sequence: NDArray[np.int64]
    """[S]"""

    def owned(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.owner_of_sequence == rank)

    def run(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.runner_of_sequence == rank)

    def back(self) -> Route:
        """The reverse route, from runners to owners."""
        return Route(owner_of_sequence=self.runner_of_sequence, runner_of_sequence=self.owner_of_sequence)


def send_sequences(group: ExpertGroup, route: Route, values: Sequence[Tensor]) -> list[Tensor]:
    """Collective: one tensor [n, ...] per owned sequence in, one per sequence run here out; only n may differ."""
    me, world = group.world_rank, group.world_size
    mine = route.owned(me)
    if len(values) != mine.size:
        raise InputError(
            f"cannot send {len(values)} tensors for the {mine.size} sequences of this rank: give one tensor for each"
        )
    rest, dtype = _common_form(group, values)
    row_bytes = int(np.prod(rest, dtype=np.int64)) * dtype.itemsize
    own_lengths = np.array([len(value) for value in values], np.int64)
    lengths = np.zeros(route.owner_of_sequence.size, np.int64)
    by_owner = np.argsort(route.owner_of_sequence, kind="stable")  # gathered by rank; on the way back not by number
    lengths[by_owner] = np.concatenate(group.gather(own_lengths, what="gathering lengths of sequences' data"))
    order = mine[np.lexsort((mine, route.runner_of_sequence[mine]))]
    flat = [_bytes(values[int(np.searchsorted(mine, s))]) for s in order]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    sizes = lengths * row_bytes
    here = route.run(me)
    sent_sizes = np.bincount(route.runner_of_sequence[mine], weights=sizes[mine], minlength=world).astype(np.int64)
    received_sizes = np.bincount(route.owner_of_sequence[here], weights=sizes[here], minlength=world).astype(np.int64)
    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    group.all_to_all(
        Channel.CONTROL, sent, sent_sizes.tolist(), received, received_sizes.tolist(),
        what="sending sequences' data between ranks",
    ).wait()  # fmt: skip
    arrived = here[np.lexsort((here, route.owner_of_sequence[here]))]
    pieces = dict(zip(arrived.tolist(), torch.split(received, sizes[arrived].tolist()), strict=True))
    return [pieces[s].view(dtype).view(int(lengths[s]), *rest) for s in here.tolist()]


def _common_form(group: ExpertGroup, values: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Trailing shape and dtype; ranks without sequences learn them from the others."""
    forms = {f"{str(value.dtype).removeprefix('torch.')} {','.join(map(str, value.shape[1:]))}" for value in values}
    said = set(group.gather_text(" | ".join(sorted(forms)) or "?", what="comparing sequences' data")) - {"?"}
    if len(said) != 1 or "|" in next(iter(said)):
        raise InputError(f"sequences' data must have one dtype and one trailing shape on all ranks, not {sorted(said)}")
    name, _, shape = next(iter(said)).partition(" ")
    return tuple(int(size) for size in shape.split(",") if size), getattr(torch, name)


def _bytes(value: Tensor) -> Tensor:
    if value.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCounts:
    """Lengths and loads of all ranks' sequences."""

    sequences: SequenceLoad
    """loads and lengths"""
    unrecorded_of_sequence: NDArray[np.int64]
    """[S] tokens whose routing is missing or cannot be replayed"""
    mini_batch_of_sequence: NDArray[np.int64]
    """[S] optimizer step of each sequence"""
    first_of_rank: NDArray[np.int64]
    """[world + 1] first sequence number of each rank"""

    @property
    def rank_of_sequence(self) -> NDArray[np.int64]:
        """[S] world rank that owns each sequence."""
        return np.repeat(np.arange(self.first_of_rank.size - 1), np.diff(self.first_of_rank))


def recorded_experts(routing: RoutingTrace) -> NDArray[np.signedinteger]:
    """[T, L, K] experts to replay; -1 for tokens without recorded routing, or with an expert twice (filler rows)."""
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
    """Raise InputError if the routing does not fit the model, or not every sequence has a mini-batch."""
    num_sequences = 0 if routing is None else routing.length_of_sequence.size
    check_mini_batches(mini_batches, num_sequences, complete=False)
    if routing is not None:
        found, required = (*routing.shape[1:], routing.num_experts), (num_layers, top_k, num_experts)
        if found != required:
            raise InputError(
                f"the routing is of another model: it has {found[0]} layers with {found[1]} of {found[2]} experts per "
                f"token, the model {required[0]} with {required[1]} of {required[2]}"
            )


def gather_counts(
    group: ExpertGroup, routing: RoutingTrace | None, experts_TLK: NDArray[np.signedinteger],
    mini_batches: NDArray[np.integer], *, num_layers: int, num_experts: int,
) -> StepCounts:  # fmt: skip
    """Collective: counts of all ranks' sequences. A rank without sequences passes None as routing."""
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
        raise InputError("cannot plan a step: no rank has a sequence")
    check_mini_batches(mini_batch_of_sequence, lengths.size)
    narrow = np.uint16 if lengths.max() < 2**16 else np.int32
    gathered = group.gather(loads.astype(narrow), what="gathering counts of routing")
    return StepCounts(
        sequences=SequenceLoad(tokens_SLE=np.concatenate(gathered).astype(np.int32), length_of_sequence=lengths),
        unrecorded_of_sequence=unrecorded_of_sequence,
        mini_batch_of_sequence=mini_batch_of_sequence,
        first_of_rank=np.concatenate([[0], np.cumsum([len(part) for part in every])]),
    )
