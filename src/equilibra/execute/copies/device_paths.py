"""Where `DeviceEngine` pulls copies and gradients from: memory of the host, of another GPU, or both at once.

Symbols: n published instances, R ranks of the node, S spare slots, P values of one expert in flat form.

**host**: shared memory of the node that every rank registers with its GPU.

    segment:  signals [2R] int64 | weights [n, P] | gradients [2, R, S, P]

After weights change, every rank writes the instances that the plan copies; GPUs pull them over the host link, which is
otherwise idle. Gradients return the same way.

**ipc**: ranks of a node open each other's tensors of homes and standing copies once, through CUDA IPC; copy engines
then pull from there (over NVLink, or inside a GPU that several processes share, where gradients are added in place).
Every publication tells where instances are, and exchanges handles again only if tensors have moved.

A handle is opened on this rank's own device: CUDA maps the other GPU's memory there, even if this process cannot see
that GPU. So copies run in streams of the receiving GPU, and a process has a context on its own GPU only.
"""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import EquilibraError, ExecuteError
from equilibra.core.visit import CopyList
from equilibra.execute.copies.segment import (
    PAGE,
    Signals,
    map_of_node,
    pages,
    register_with_device,
    unregister,
    view_of,
)
from equilibra.execute.copies.standing import StandingStore
from equilibra.execute.copies.transfer import Copied
from equilibra.execute.group import ExpertGroup
from equilibra.execute.watch import first_line


@dataclass(kw_only=True, eq=False)
class _Part:
    values: Tensor
    raw: Tensor
    """uint8"""
    device: torch.device

    @classmethod
    def of(cls, group: ExpertGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Part:
        num_bytes = max(pages(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), PAGE)
        memory = map_of_node(group, num_bytes)
        raw = view_of(memory, 0, (num_bytes,), torch.uint8)
        group.all_succeed(lambda: register_with_device(raw, device), what="registering shared memory with CUDA")
        return cls(values=view_of(memory, 0, shape, dtype), raw=raw, device=device)

    def close(self) -> None:
        unregister(self.raw, self.device)


def signals_of_node(group: ExpertGroup, device: torch.device) -> tuple[Signals, _Part]:
    """Given and taken signals of every rank of the node, initially 0."""
    part = _Part.of(group, (2 * group.cluster.ranks_per_node,), torch.int64, device)
    return Signals(part.values.numpy(), device), part


class PinnedPath:
    """A DevicePath through registered host memory."""

    in_place = False

    def __init__(self, group: ExpertGroup, banks_2SP: Tensor, row: Tensor) -> None:
        self.group, self.banks_2SP, self.row = group, banks_2SP, row
        self.signals, self._signals = signals_of_node(group, row.device)
        shape = (2, group.cluster.ranks_per_node, *banks_2SP.shape[1:])
        self._gradients = _Part.of(group, shape, banks_2SP.dtype, row.device)
        self._weights: _Part | None = None
        self._copied: Copied | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.raw.nbytes for part in (self._signals, self._gradients, self._weights) if part is not None)

    def publish(self, copied: Copied, source: StandingStore) -> None:
        needed = copied.most_of_a_node
        if self._weights is None or len(self._weights.values) < needed:
            if self._weights is not None:
                self._weights.close()
            shape = (needed, self.row.numel())
            self._weights = _Part.of(self.group, shape, self.row.dtype, self.row.device)
        for entry in np.flatnonzero(copied.origin == self.group.rank).tolist():
            source.write_flat(int(copied.layer[entry]), int(copied.expert[entry]), self._weights.values[entry])
        self._copied = copied

    def pull_weights(self, copies: CopyList, slots_nP: Tensor, *, first: int = 0) -> None:
        """Pull the values of every copy from `first` on."""
        assert self._weights is not None
        assert self._copied is not None
        for slot, entry in enumerate(self._copied.entries(copies)):
            slots_nP[slot, first:].copy_(self._weights.values[entry, first:], non_blocking=True)

    def push_gradients(self, bank: int, count: int) -> None:
        mine = self._gradients.values[bank, self.group.rank - self.group.first_of_node]
        mine[:count].copy_(self.banks_2SP[bank, :count], non_blocking=True)

    def gradients(self, copies: CopyList, bank: int, rows_kP: Tensor) -> list[Tensor]:
        for row, target, slot in zip(rows_kP, copies.served_target.tolist(), copies.served_slot.tolist(), strict=True):
            row.copy_(self._gradients.values[bank, target - copies.first_rank, slot], non_blocking=True)
        return list(rows_kP)

    def close(self) -> None:
        """The memory is freed with the last rank that maps it."""
        for part in (self._signals, self._gradients, self._weights):
            if part is not None:
                part.close()


logger = logging.getLogger(__name__)


def handle_of(tensor: Tensor) -> dict[str, Any]:
    """JSON-compatible handle for other processes to open a tensor.

    torch keeps what it has shared alive, by counts of one reader each. So an alias is shared: the memory stays its
    owner's, who may free it once readers have let go (`IpcPath.publish`, `Runtime.release`).
    """
    owned = tensor.untyped_storage()
    alias: Any = torch._C._construct_storage_from_data_pointer(owned.data_ptr(), tensor.device, owned.nbytes())  # noqa: SLF001
    shared = alias._share_cuda_()
    encoded = [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in shared]
    return {"storage": encoded, "offset": tensor.storage_offset(), "shape": list(tensor.shape)}


def opened(handle: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Another process's tensor, mapped on this rank's own device; the sender's device number is ignored."""
    _, *rest = handle["storage"]
    raw = [base64.b64decode(x) if isinstance(x, str) else x for x in rest]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *raw)  # noqa: SLF001
    shape = torch.Size(handle["shape"])
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, int(handle["offset"]), shape, strides)


def exchanged(
    group: ExpertGroup, tensors: list[Tensor], dtype: torch.dtype, device: torch.device
) -> dict[int, list[Tensor]]:
    """Collective: the tensors of every rank of the node by rank, mapped on this rank's device."""
    mine = group.all_succeed(
        lambda: json.dumps([handle_of(tensor) if tensor.numel() else None for tensor in tensors]),
        what="sharing memory of the GPU",
    )
    said = group.gather_text(mine, what="exchanging handles of GPU memory")
    first, per_node = group.index * group.num_ranks, group.cluster.ranks_per_node

    def open_all() -> dict[int, list[Tensor]]:
        result = {group.rank: tensors}
        for rank in range(group.first_of_node, group.first_of_node + per_node):
            if rank != group.rank:
                handles = json.loads(said[first + rank])
                result[rank] = [_opened_or_empty(handle, dtype, device) for handle in handles]
        return result

    return group.all_succeed(open_all, what="opening memory of other GPUs")


def ipc_works(group: ExpertGroup, like: Tensor) -> bool:
    """Collective: whether the node's GPUs can open each other's memory; containers and drivers may forbid it."""

    def works() -> bool:
        try:
            check_peers(group, like.device)
            exchanged(group, [like.new_zeros(8)], like.dtype, like.device)
        except (EquilibraError, RuntimeError) as error:
            logger.warning("GPUs of this node cannot open each other's memory (%s): copies take other paths", error)
            return False
        return True

    return group.all_succeed(works, what="trying whether GPUs can open each other's memory")


def gpus_of_node(group: ExpertGroup, device: torch.device) -> list[str]:
    """Collective: UUID of every rank's GPU; device numbers are ambiguous where a process sees one GPU only."""
    name = str(torch.cuda.get_device_properties(device).uuid)
    said = group.gather_text(name, what="asking for names of GPUs")
    first = group.index * group.num_ranks + group.first_of_node
    return said[first : first + group.cluster.ranks_per_node]


def share_a_gpu(group: ExpertGroup, device: torch.device) -> bool:
    """Collective: whether all ranks of the node use one GPU."""
    return len(set(gpus_of_node(group, device))) == 1


def check_peers(group: ExpertGroup, device: torch.device) -> None:
    """Collective: ExecuteError if GPUs lack peer access; one that cannot see the others fails when it opens memory."""
    names = gpus_of_node(group, device)
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}

    def check() -> None:
        for rank, name in enumerate(names, group.first_of_node):
            peer = seen.get(name, device.index)
            if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
                raise ExecuteError(
                    f"rank {group.rank} (GPU {device.index}) cannot read the memory of rank {rank} (GPU {peer}): there "
                    "is no peer access between them; use the path host or collective (`equilibra doctor` lists pairs)"
                )

    group.all_succeed(check, what="asking whether GPUs can read each other's memory")


class IpcPath:
    """A DevicePath through CUDA IPC."""

    def __init__(self, group: ExpertGroup, banks_2SP: Tensor, row: Tensor) -> None:
        self.group, self.banks_2SP, self.row = group, banks_2SP, row
        check_peers(group, row.device)
        self.signals, self._signals = signals_of_node(group, row.device)
        self._banks = exchanged(group, [banks_2SP], banks_2SP.dtype, row.device)
        self.in_place = share_a_gpu(group, row.device)
        self._tensors: dict[int, list[Tensor]] = {}
        """by rank of the node: memory of its homes layer by layer, then its standing copies"""
        self._shared: tuple[int, ...] = ()
        self._location: NDArray[np.int64] = np.zeros(0, np.int64)
        self._copied: Copied | None = None

    @property
    def num_bytes(self) -> int:
        """Signals only: mapped memory is counted on the rank that owns it."""
        return self._signals.raw.nbytes

    def publish(self, copied: Copied, source: StandingStore) -> None:
        mine = [tensor for weights in source.weights for tensor in weights.memory()] + [source.rows_CP]
        now = tuple(tensor.data_ptr() for tensor in mine)
        moved = self.group.gather(np.array([now != self._shared]), what="asking whether weights have moved")
        if any(bool(part[0]) for part in moved):
            self._tensors = {}  # before others open theirs: what nobody has open can be freed
            self._tensors = exchanged(self.group, mine, self.row.dtype, self.row.device)
            self._shared = now
        own = np.flatnonzero(copied.origin == self.group.rank)
        told = np.array([source.location(int(copied.layer[i]), int(copied.expert[i])) for i in own], np.int64)
        said = self.group.gather(told, what="telling where instances lie")
        first = self.group.index * self.group.num_ranks
        self._location = np.zeros(copied.origin.size, np.int64)
        for rank in set(copied.origin.tolist()):
            self._location[copied.origin == rank] = said[first + rank]
        self._copied, self._homes = copied, source.weights[0]

    def pull_weights(self, copies: CopyList, slots_nP: Tensor, *, last: int | None = None) -> None:
        """Pull the values of every copy before `last`, which ends a row of a part."""
        assert self._copied is not None
        layout, last = self._homes.layout, self.row.numel() if last is None else last
        first_of_layer = copies.layer * len(self._homes.memory())
        locations = self._location[self._copied.entries(copies)].tolist()
        for slot, (at, origin) in enumerate(zip(locations, copies.held_origin.tolist(), strict=True)):
            tensors = self._tensors[origin]
            if at < 0:
                slots_nP[slot, :last].copy_(tensors[-1][-1 - at, :last], non_blocking=True)
                continue
            for number, begin in enumerate(layout.first.values()):
                tensor, row = self._homes.place(at, number)
                values = tensors[first_of_layer + tensor][row].reshape(-1)[: max(last - begin, 0)]
                slots_nP[slot, begin : begin + values.numel()].copy_(values, non_blocking=True)

    def push_gradients(self, bank: int, count: int) -> None:
        """Nothing to do: origins read the banks directly."""

    def gradients(self, copies: CopyList, bank: int, rows_kP: Tensor) -> list[Tensor]:
        places = zip(copies.served_target.tolist(), copies.served_slot.tolist(), strict=True)
        held = [self._banks[target][0][bank, slot] for target, slot in places]
        if self.in_place:
            return held
        for row, there in zip(rows_kP, held, strict=True):
            row.copy_(there, non_blocking=True)
        return list(rows_kP)

    def close(self) -> None:
        self._tensors, self._banks = {}, {}
        self._signals.close()


class BothPath(IpcPath):
    """IPC for gradients and the first part of every copy, the host link for the rest, at the same time."""

    def __init__(self, group: ExpertGroup, banks_2SP: Tensor, row: Tensor, host_share: float) -> None:
        super().__init__(group, banks_2SP, row)
        self._host = PinnedPath(group, banks_2SP[:, :0], row)
        self._host_stream = torch.cuda.Stream(row.device)  # type: ignore[no-untyped-call]
        self._cut = int(row.numel() * (1 - host_share)) // 8 * 8

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._host.num_bytes

    def publish(self, copied: Copied, source: StandingStore) -> None:
        super().publish(copied, source)
        self._host.publish(copied, source)

    def pull_weights(self, copies: CopyList, slots_nP: Tensor, *, last: int | None = None) -> None:  # noqa: ARG002
        here = torch.cuda.current_stream(self.row.device)
        self._host_stream.wait_stream(here)
        with torch.cuda.stream(self._host_stream):
            self._host.pull_weights(copies, slots_nP, first=self._cut)
        super().pull_weights(copies, slots_nP, last=self._cut)
        here.wait_stream(self._host_stream)

    def close(self) -> None:
        self._host.close()
        super().close()


def _opened_or_empty(handle: dict[str, Any] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    if handle is None:
        return torch.empty(0, dtype=dtype, device=device)
    try:
        return opened(handle, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExecuteError(
            f"cannot open the memory of another GPU ({first_line(error)}): ranks of a node need peer access between "
            "their GPUs and a shared IPC namespace (docker: --ipc=host), and expandable_segments in "
            "PYTORCH_CUDA_ALLOC_CONF can forbid it; or use another path (`equilibra doctor` tells which work)"
        ) from error
