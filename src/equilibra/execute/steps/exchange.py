"""Sequences to the ranks that run them, and back: one all-to-all over all ranks, of whatever belongs to a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import Channel, ExpertGroup

__all__ = ["Route", "send_sequences"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """Who has each sequence, and who runs it, as world ranks."""

    owner_of_sequence: NDArray[np.int64]
    """[S]"""
    runner_of_sequence: NDArray[np.int64]
    """[S]"""

    def owned(self, rank: int) -> NDArray[np.int64]:
        """Numbers of a rank's own sequences."""
        return np.flatnonzero(self.owner_of_sequence == rank)

    def run(self, rank: int) -> NDArray[np.int64]:
        """Numbers of the sequences a rank runs."""
        return np.flatnonzero(self.runner_of_sequence == rank)

    def back(self) -> Route:
        """The way back: from those that run sequences to those that have them."""
        return Route(owner_of_sequence=self.runner_of_sequence, runner_of_sequence=self.owner_of_sequence)


def send_sequences(group: ExpertGroup, route: Route, values: Sequence[Tensor]) -> list[Tensor]:
    """Collective: one tensor [n, ...] per own sequence in, one per sequence that runs here out, by sequence number.

    All tensors have one dtype and one shape behind the first axis; n may differ from sequence to sequence.
    """
    me, world = group.world_rank, group.world_size
    mine = route.owned(me)
    if len(values) != mine.size:
        raise InputError(
            f"{mine.size} sequences are on this rank, {len(values)} tensors were given: one for each is needed"
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
    """Shape behind the first axis and dtype, which ranks without sequences learn from the others."""
    forms = {f"{str(value.dtype).removeprefix('torch.')} {','.join(map(str, value.shape[1:]))}" for value in values}
    text = " | ".join(sorted(forms)) or "?"
    raw = np.frombuffer(text.encode()[:256].ljust(256, b"\0"), np.uint8)[None]
    said = {part.tobytes().rstrip(b"\0").decode() for part in group.gather(raw, what="comparing sequences' data")}
    said.discard("?")
    if len(said) != 1 or "|" in next(iter(said)):
        raise InputError(f"sequences' data must have one dtype and one shape behind the first axis, not {sorted(said)}")
    name, _, shape = next(iter(said)).partition(" ")
    return tuple(int(size) for size in shape.split(",") if size), getattr(torch, name)


def _bytes(value: Tensor) -> Tensor:
    if value.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)
