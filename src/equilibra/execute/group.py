"""The processes that run a step: expert-parallel groups, their nodes, and their collectives.

World rank w is rank w % R of expert-parallel group w // R. Each kind of traffic has its own process groups, so a
prefetch never queues behind a dispatch. Every call is collective over its group.

If a rank dies, fails or hangs, the call raises `RankLostError` on all others within `timeout_s`. `with group:` tells
the others why this rank fails, and stops the watch thread (`watch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from math import inf
from threading import Thread
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from equilibra.core import errors
from equilibra.core.checks import check_number
from equilibra.core.errors import EquilibraError, InputError, MismatchError, RankLostError
from equilibra.core.placement import Cluster
from equilibra.execute.watch import ADVICE, STORE_S, Watch, first_line, nccl_of, without_torch_watchdog

T = TypeVar("T")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""renamed in torch 2.13"""
OWN_ERRORS: dict[str, type[EquilibraError]] = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
"""by name, so that a failure reported by another rank keeps its class"""


class Channel(StrEnum):
    """Kinds of traffic, each with its own process groups."""

    DISPATCH = "dispatch"
    """tokens to experts and back, over the expert-parallel group"""
    STANDING = "standing"
    """standing copies, their gradients and moving homes, over the expert-parallel group"""
    COPIES = "copies"
    """flash copies, inside a node"""
    GRADIENTS = "gradients"
    """gradients of flash copies, inside a node"""
    CONTROL = "control"
    """counts, hashes, votes and sequences' data, over all ranks, always in host memory (gloo)"""
    DENSE = "dense"
    """gradients of dense parameters, over all ranks"""
    REPLICAS = "replicas"
    """gradients, between ranks of the same number in all expert-parallel groups"""


class Pending(Protocol):
    """An operation in flight."""

    def wait(self) -> None:
        """Wait until it is done; RankLostError if it cannot finish."""


@dataclass(frozen=True)
class Ready:
    """An operation that is already done."""

    def wait(self) -> None:
        pass


@dataclass(eq=False)
class Then:
    """An operation followed by an action of the host, which the first `wait` does."""

    moving: Pending
    action: Callable[[], None] | None

    def wait(self) -> None:
        self.moving.wait()
        action, self.action = self.action, None
        if action is not None:
            action()


@dataclass(frozen=True, kw_only=True)
class _Work:
    what: str
    work: dist.Work | None
    keep: tuple[Tensor, ...]
    """buffers that must outlive it"""
    channel: Channel
    watch: Watch
    blocks: bool
    """whether `wait` blocks the host; if not, the current stream"""

    def wait(self) -> None:
        if self.work is None:
            return
        device = self.keep[0].device
        with lost_rank_is_an_error(self.what, self.watch):
            if device.type == "cuda" and self.blocks:
                self.watch.expect(self.channel, self.what, self.work.is_completed, device)
            self.work.wait()
            if device.type == "cuda" and not self.blocks:
                reached = torch.cuda.current_stream(device).record_event()
                if not torch.cuda.is_current_stream_capturing():
                    self.watch.expect(self.channel, self.what, reached.query, device)
        self.watch.check(self.what)


_Trial = Callable[[dist.ProcessGroup, torch.device], object]
"""moves one value between all ranks that an operation connects"""


def _try_exchange(group: dist.ProcessGroup, device: torch.device) -> None:
    values = torch.zeros(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(values), values, group=group)


def _try_gather(group: dist.ProcessGroup, device: torch.device) -> None:
    _all_gather(torch.zeros(group.size(), device=device), torch.zeros(1, device=device), group=group)


def _try_sum(group: dist.ProcessGroup, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)


NOT_LOST = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""RuntimeErrors of this rank's own device"""


@contextmanager
def lost_rank_is_an_error(what: str, watch: Watch | None = None) -> Iterator[None]:
    """Turn errors of torch.distributed into RankLostError, but not those of this rank's own device."""
    try:
        yield
    except NOT_LOST:
        raise
    except (RuntimeError, dist.DistError) as error:
        if "out of memory" in str(error):  # NCCL, on this rank
            raise
        said = f"another rank is gone, has failed or is slower than the timeout ({first_line(error, 300)})"
        if watch is not None:
            raise watch.lost(what, f"lost a connection while {what}: {said}") from error
        raise RankLostError(f"{what} did not finish: {said}; {ADVICE}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertGroup:
    """Place of a process among the ranks, and its process groups. Without torch.distributed, a group of one."""

    cluster: Cluster
    """shape of the expert-parallel group"""
    rank: int = 0
    """within the expert-parallel group"""
    index: int = 0
    """number of the expert-parallel group"""
    num_groups: int = 1
    """expert-parallel groups (data parallelism)"""
    timeout_s: float = 300.0
    """after which a silent rank counts as lost"""
    channels: dict[Channel, dist.ProcessGroup]
    """empty in a group of one"""
    watch: Watch = field(default_factory=lambda: Watch(rank=0, world=1, timeout_s=inf))
    """detects lost ranks"""
    connected: set[tuple[Channel, _Trial]] = field(default_factory=set)
    """channels whose ranks NCCL has connected, and for what"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Tell the others of an error, so that nobody waits for this rank, and stop the watch."""
        heard = self.watch.cause
        if error is not None:
            self.watch.fail(error)
        self.watch.close()
        if heard is not None and error is not None and not isinstance(error, EquilibraError):
            raise self.watch.lost("the step") from error  # what was computed since another rank was lost is worthless

    def finish(self, stream: torch.cuda.Stream, *, what: str) -> None:
        """Block the host until a stream is done; RankLostError if it cannot finish."""
        self.watch.finish(stream.record_event(), what)

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @property
    def world_size(self) -> int:
        return self.num_ranks * self.num_groups

    @property
    def world_rank(self) -> int:
        return self.index * self.num_ranks + self.rank

    @property
    def node(self) -> int:
        return self.rank // self.cluster.ranks_per_node

    @property
    def first_of_node(self) -> int:
        return self.node * self.cluster.ranks_per_node

    @property
    def ranks_of_node(self) -> range:
        return range(self.first_of_node, self.first_of_node + self.cluster.ranks_per_node)

    def all_to_all(
        self, channel: Channel, sent: Tensor, sent_sizes: Sequence[int], received: Tensor,
        received_sizes: Sequence[int], *, what: str,
    ) -> Pending:  # fmt: skip
        """Start sending consecutive pieces of `sent` to the members in order, and filling `received` from them."""
        if len(sent_sizes) == 1 or channel not in self.channels:
            received.copy_(sent)
            return Ready()
        exchange = partial(dist.all_to_all_single, received, sent, list(received_sizes), list(sent_sizes))
        return self._start(channel, what, (sent, received), exchange, _try_exchange)

    def all_gather(self, channel: Channel, sent: Tensor, received: Tensor, *, what: str) -> Pending:
        """Start filling `received` with the members' `sent` in order; sizes are equal on all members."""
        if channel not in self.channels:
            received.copy_(sent)
            return Ready()
        return self._start(channel, what, (sent, received), partial(_all_gather, received, sent), _try_gather)

    def sum(self, channel: Channel, tensor: Tensor, *, what: str) -> Pending:
        """Start summing a tensor over the members in place."""
        if channel not in self.channels:
            return Ready()
        return self._start(channel, what, (tensor,), partial(dist.all_reduce, tensor), _try_sum)

    def _connect(self, channel: Channel, device: torch.device, try_it: _Trial, what: str) -> None:
        """Connect a channel's ranks in a thread, because NCCL's host calls wait for other ranks without a time limit.

        NCCL connects two ranks when something first travels between them, so the trial moves a value between all that
        the operation may connect.
        """
        self.watch.check(what)
        if (channel, try_it) in self.connected or device.type != "cuda" or nccl_of(self.channels[channel]) is None:
            return
        what, failed = f"connecting ranks for {channel}", list[BaseException]()

        def connect() -> None:
            try:
                try_it(self.channels[channel], device)
            except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
                failed.append(error)

        thread = Thread(target=connect, daemon=True)
        thread.start()
        self.watch.until(lambda: not thread.is_alive(), what)
        with lost_rank_is_an_error(what, self.watch):
            for error in failed:
                raise error
        self.connected.add((channel, try_it))

    def _start(
        self, channel: Channel, what: str, keep: tuple[Tensor, ...], collective: Callable[..., dist.Work | None],
        try_it: _Trial,
    ) -> Pending:  # fmt: skip
        group, device = self.channels[channel], keep[0].device
        self._connect(channel, device, try_it, what)
        blocks = nccl_of(group) is None
        with lost_rank_is_an_error(what, self.watch), nullcontext() if blocks else self.watch.during(what, device):
            work = collective(group=group, async_op=True)
        return _Work(what=what, work=work, keep=keep, channel=channel, watch=self.watch, blocks=blocks)

    def gather(self, values: NDArray[np.generic], *, what: str) -> list[NDArray[np.generic]]:
        """Arrays of all ranks; lengths may differ, dtype and trailing shape may not."""
        if not self.channels:
            return [values]
        lengths = self._gather_bytes(np.array([len(values)], np.int64).tobytes(), 8, what)
        counts = [int(np.frombuffer(raw, np.int64)[0]) for raw in lengths]
        row_bytes = int(np.prod(values.shape[1:], dtype=np.int64)) * values.dtype.itemsize
        raws = self._gather_bytes(np.ascontiguousarray(values).tobytes(), max(counts) * row_bytes, what)
        return [
            np.frombuffer(raw[: count * row_bytes], values.dtype).reshape(count, *values.shape[1:])
            for raw, count in zip(raws, counts, strict=True)
        ]

    def _gather_bytes(self, raw: bytes, size: int, what: str) -> list[bytes]:
        self.watch.check(what)  # what was computed since a rank was lost goes no further
        if size == 0:
            return [b""] * self.world_size
        mine = torch.frombuffer(bytearray(raw.ljust(size, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        with lost_rank_is_an_error(what, self.watch):
            dist.all_gather(every, mine, group=self.channels[Channel.CONTROL])
        return [part.numpy().tobytes() for part in every]

    def gather_text(self, text: str, *, what: str) -> list[str]:
        return [part.tobytes().decode() for part in self.gather(np.frombuffer(text.encode(), np.uint8), what=what)]

    def agree(self, value: str, *, what: str) -> None:
        """Raise MismatchError on every rank, naming both values, unless all ranks pass the same value."""
        said = self.gather_text(value[:256], what=what)
        other = next((rank for rank, text in enumerate(said) if text != said[0]), None)
        if other is not None:
            raise MismatchError(
                f"ranks disagree about {what}: rank 0 has {said[0]}, rank {other} has {said[other]}; they must run the "
                "same version with the same settings"
            )

    def all_succeed(self, attempt: Callable[[], T], *, what: str) -> T:
        """Run `attempt` and return its result; if it fails on any rank, raise on every rank."""
        failure: Exception | None = None
        try:
            result = attempt()
        except Exception as error:  # noqa: BLE001 - whatever it was, the others must hear of it
            failure = error
        text = f"{type(failure).__name__}: {first_line(failure)}" if failure else ""
        said = self.gather_text(text.encode()[:600].decode(errors="replace"), what=what)
        if failure is not None:
            raise failure
        for rank, heard in enumerate(said):
            if heard:
                kind = OWN_ERRORS.get(heard.partition(":")[0], RankLostError)
                raise kind(f"{what} failed on rank {rank}: {heard}")
        return result

    def barrier(self, *, what: str) -> None:
        if self.channels:
            self.watch.check(what)
            with lost_rank_is_an_error(what, self.watch):
                dist.all_reduce(torch.zeros(1), group=self.channels[Channel.CONTROL])


def patient_group(group: ExpertGroup, *, timeout_s: float, what: str) -> ExpertGroup:
    """Collective: the same ranks with their own gloo connections and another timeout.

    For long waits that do not mean a lost rank (disks, rollouts, engines). A dead process is still noticed at once.
    """
    if not group.channels:
        return replace(group, timeout_s=timeout_s)
    with lost_rank_is_an_error(what):
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return replace(group, channels={Channel.CONTROL: control}, timeout_s=timeout_s)


def join_expert_group(cluster: Cluster, *, timeout_s: float = 300.0) -> ExpertGroup:
    """Collective over all processes, a multiple of the cluster's ranks; a group of one without torch.distributed."""
    check_number("timeout_s", timeout_s, above=0, high=1e6, below=True)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = cluster.num_ranks
    if world % size:
        raise InputError(
            f"cannot form expert-parallel groups of {size} ranks ({cluster.num_nodes} nodes x "
            f"{cluster.ranks_per_node}) from {world} processes: start a multiple of {size}, or change the cluster"
        )
    if world == 1:
        return ExpertGroup(cluster=cluster, timeout_s=timeout_s, channels={})
    me, per_node = dist.get_rank(), cluster.ranks_per_node
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
    members = {
        Channel.DISPATCH: groups, Channel.STANDING: groups, Channel.COPIES: nodes, Channel.GRADIENTS: nodes,
        Channel.CONTROL: [list(range(world))], Channel.DENSE: [list(range(world))],
    }  # fmt: skip
    if world > size:
        members[Channel.REPLICAS] = [list(range(first, world, size)) for first in range(size)]
    channels = {}
    with lost_rank_is_an_error("joining the expert-parallel group"):
        for channel, parts in members.items():
            for part in parts:
                made = new_group(part, timeout_s, backend="gloo" if channel is Channel.CONTROL else None)
                if me in part:
                    channels[channel] = made
    return ExpertGroup(
        cluster=cluster, rank=me % size, index=me // size, num_groups=world // size, timeout_s=timeout_s,
        channels=channels, watch=watch_over(channels, timeout_s),
    )  # fmt: skip


def new_group(ranks: list[int] | None, timeout_s: float, *, backend: str | None) -> dist.ProcessGroup:
    """Collective over all processes: a process group of some ranks, with the default backend if None.

    NCCL's own timeout is later than ours, because torch ends the process when it is reached.
    """
    world = dist.group.WORLD
    nccl = backend is None and world is not None and nccl_of(world) is not None
    limit = timedelta(seconds=2 * timeout_s + 60 if nccl else timeout_s)
    with without_torch_watchdog():
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend=backend)
    return made


def device_name(device: torch.device | None) -> str | None:
    """The driver's name of a GPU; None without a GPU."""
    return torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None


def watch_over(channels: Mapping[Channel, dist.ProcessGroup], timeout_s: float) -> Watch:
    """A watch over the ranks that these channels connect; they share the keys of one store."""
    control = channels[Channel.CONTROL]
    name = getattr(control, "group", control).group_name  # slime's group that stands for another has no name
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    if hasattr(store, "clone"):  # blocking calls of others must not hold up the watch
        store = store.clone()
        store.set_timeout(timedelta(seconds=STORE_S))
    return Watch(
        rank=control.rank(), world=control.size(), timeout_s=timeout_s,
        store=PrefixStore(f"equilibra {name}", store),
        backends=[nccl for group in set(channels.values()) if (nccl := nccl_of(group)) is not None],
    )  # fmt: skip
