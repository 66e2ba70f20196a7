"""Exchanges between ranks that share one GPU: through NCCL's sockets, or each other's memory.

Symbols: R ranks, N rows.

NCCL treats processes on one GPU as several hosts, so its all-to-all goes through sockets: 32 MiB per rank take 11 ms.
Over NVLink they would take 0.1 ms. `IpcTokens` is the same exchange through CUDA IPC at the speed of the GPU's memory,
so that communication is as small a part of the step as in a node with fast links. Both serve Megatron's own all-to-all
dispatcher.

    buffer [2, R, bytes]    rows for each rank, of exchange n in bank n % 2
    signals ready and taken of every rank: n once its rows are there, n once it has pulled those of all others
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.megatron_gpu.clock import Spans
from equilibra.execute.copies.device_paths import exchanged, signals_of_node
from equilibra.execute.group import ExpertGroup


class IpcTokens:
    """All-to-all between the processes of one GPU, queued on the current stream."""

    def __init__(self, group: ExpertGroup, device: torch.device, bytes_per_rank: int) -> None:
        self.group, self.capacity = group, bytes_per_rank
        self._buffer = torch.empty(2, group.num_ranks, bytes_per_rank, dtype=torch.uint8, device=device)
        self._theirs = exchanged(group, [self._buffer], torch.uint8, device)
        self._signals, self._memory = signals_of_node(group, device)
        self._number = 0
        self.expired = False
        """whether a rank was waited for in vain, so that results are worthless"""
        self._timer: threading.Timer | None = None

    def expect_within(self, seconds: float | None) -> None:
        """Release all streams that still wait after this time; None: cancel that."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self.expired = True
        self._signals.release()

    def exchange(self, rows: Tensor, sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        """Rows in the order of ranks, as `all_to_all_single`. sizes: rows for each rank, and from each."""
        me, num_ranks = self.group.rank, self.group.num_ranks
        others = [(me + step) % num_ranks for step in range(1, num_ranks)]
        stream = torch.cuda.current_stream(rows.device)
        self._number += 1
        number, bank = self._number, self._number % 2
        sent = _as_bytes(rows, sizes)
        out = rows.new_empty(sum(received_sizes), *rows.shape[1:])
        received = _as_bytes(out, received_sizes)
        if max(part.numel() for part in (*sent, *received)) > self.capacity:
            raise ValueError(f"{max(part.numel() for part in sent)} bytes for a rank, room for {self.capacity}")
        if number > 2:
            for rank in others:
                self._signals.wait(num_ranks + rank, number - 2, stream)
        for rank in others:
            self._buffer[bank, rank, : sent[rank].numel()].copy_(sent[rank], non_blocking=True)
        self._signals.give(me, number, stream)
        received[me].copy_(sent[me], non_blocking=True)
        for rank in others:
            self._signals.wait(rank, number, stream)
            received[rank].copy_(self._theirs[rank][0][bank, me, : received[rank].numel()], non_blocking=True)
        self._signals.give(num_ranks + me, number, stream)
        return out

    def close(self) -> None:
        """Close the links; call it after all ranks are done."""
        self.expect_within(None)
        self._theirs = {}
        self._memory.close()


def _as_bytes(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of contiguous rows as bytes."""
    flat = rows.detach().contiguous().reshape(-1).view(torch.uint8)
    width = rows[:1].numel() * rows.element_size() if len(rows) else 0
    return list(torch.split(flat, [int(size) * width for size in sizes]))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, links: IpcTokens, sizes: list[int], received_sizes: list[int]) -> Tensor:  # noqa: ANN401
        ctx.links, ctx.sizes, ctx.received_sizes = links, sizes, received_sizes
        return links.exchange(rows, sizes, received_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        return ctx.links.exchange(gradient, ctx.received_sizes, ctx.sizes), None, None, None


_own: list[Callable[..., Tensor]] = []


def route_through(links: IpcTokens | None, spans: Spans) -> None:
    """Make Megatron's all-to-all dispatcher use these links (None: its own), and record its exchanges."""
    from megatron.core.transformer.moe import token_dispatcher  # noqa: PLC0415

    if not _own:
        _own.append(token_dispatcher.all_to_all)
    own = _own[0]

    def all_to_all(group: Any, rows: Tensor, received_sizes: Any = None, sizes: Any = None) -> Tensor:  # noqa: ANN401
        def move(part: Tensor) -> Tensor:
            if links is None:
                return own(group, part, received_sizes, sizes)
            moved: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
                part, links, _numbers(sizes, len(part), links), _numbers(received_sizes, len(part), links)
            )
            return moved

        return spans.around(move, rows)

    token_dispatcher.all_to_all = all_to_all


def _numbers(sizes: Any, num_rows: int, links: IpcTokens) -> list[int]:  # noqa: ANN401
    num_ranks = links.group.num_ranks
    return [num_rows // num_ranks] * num_ranks if sizes is None else [int(size) for size in sizes]
