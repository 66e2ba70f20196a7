"""Memory that all ranks of a node map, and signals in it that GPUs set and wait for without the host.

The segment never has a name: other ranks open it through the process that made it, so nothing is left behind however
processes end. Its size is reserved up front, so a full /dev/shm is an error at once and not a crash later.

A signal is a growing number. One stream writes it after the work queued before, another waits until it reaches a value
(CUDA's stream memory operations). On closing, the host raises all signals so that no stream waits for a lost rank.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import BudgetError, ExecuteError
from equilibra.execute.group import ExpertGroup

GREATER_OR_EQUAL = 0
FOREVER = np.iinfo(np.int64).max


class Signals:
    """Signals [n] in memory registered with CUDA."""

    def __init__(self, values: NDArray[np.int64], device: torch.device) -> None:
        self.values = values
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            _check(_driver().cuMemHostGetDevicePointer_v2(
                ctypes.byref(address), ctypes.c_void_p(values.ctypes.data), ctypes.c_uint(0)
            ), "mapping signals")  # fmt: skip
        self._address = address.value

    def give(self, number: int, value: int, stream: torch.cuda.Stream) -> None:
        """Set a signal once the stream's work queued so far is done."""
        with torch.cuda.device(stream.device):  # the default stream has no number: it is of the device that is current
            _check(_driver().cuStreamWriteValue64_v2(*self._arguments(number, value, stream)), "giving a signal")

    def wait(self, number: int, value: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait until a signal reaches a value."""
        with torch.cuda.device(stream.device):
            _check(_driver().cuStreamWaitValue64_v2(*self._arguments(number, value, stream)), "waiting for a signal")

    def _arguments(self, number: int, value: int, stream: torch.cuda.Stream) -> tuple[Any, ...]:
        return (
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._address + 8 * number), ctypes.c_uint64(value),
            ctypes.c_uint(GREATER_OR_EQUAL),
        )  # fmt: skip

    def release(self) -> None:
        self.values[:] = FOREVER


def register_with_device(memory: torch.Tensor, device: torch.device) -> None:
    """Let a GPU read and write host memory directly."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        raise ExecuteError(
            f"CUDA cannot register {memory.nbytes / 2**20:.0f} MiB of shared memory (error {int(result)}): raise the "
            "limit of locked memory (ulimit -l), or use another path; `equilibra doctor` tells which work"
        )


def unregister(memory: torch.Tensor, device: torch.device) -> None:
    """Undo `register_with_device`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise ExecuteError(f"{what} failed with CUDA error {result}: device paths need a driver for CUDA 12 or newer")


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point of it
PAGE = 4096


def map_of_node(group: ExpertGroup, num_bytes: int) -> mmap.mmap:
    """Collective over all nodes: memory that the node's first rank makes and the others open."""
    made: list[int] = []  # here, so that it is closed if another rank fails

    def create() -> None:
        if group.rank == group.first_of_node:
            made.append(create_segment(num_bytes, user="the host path", instead="use the collective path"))

    def open_it() -> mmap.mmap:
        descriptor = made[0] if made else _open_of_node(*where)
        try:
            return mmap.mmap(descriptor, num_bytes)
        finally:
            if not made:
                os.close(descriptor)

    try:
        group.all_succeed(create, what="making shared memory of the node")
        mine = [os.getpid(), made[0], os.fstat(made[0]).st_ino] if made else [0, 0, 0]
        every = group.gather(np.array(mine, np.int64), what="sharing memory of the node")
        where = every[group.index * group.num_ranks + group.first_of_node].tolist()
        return group.all_succeed(open_it, what="opening shared memory of the node")
    finally:
        for descriptor in made:
            os.close(descriptor)


def pages(num_bytes: int) -> int:
    """Bytes, rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def view_of(memory: mmap.mmap, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor view of the memory."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)


def create_segment(num_bytes: int, *, user: str, instead: str) -> int:
    """Descriptor of an unnamed file in memory, with its size reserved. user, instead: for the message if it is full."""
    try:
        descriptor = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ExecuteError(f"cannot make a shared-memory segment in {SHARED_MEMORY}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise BudgetError(
            f"{user} needs {num_bytes / 2**20:.0f} MiB of shared memory in {SHARED_MEMORY}: {error.strerror}; make it "
            f"larger (docker: --shm-size), or {instead}"
        ) from error
    return descriptor


def open_segment(process: int, descriptor: int, inode: int) -> int:
    """What another process of this machine has open; `inode` tells it from anything else. OSError if it cannot be."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)
    raise OSError(errno.ESTALE, "it is another file")


def _open_of_node(process: int, descriptor: int, inode: int) -> int:
    try:
        return open_segment(process, descriptor, inode)
    except OSError as error:
        raise ExecuteError(
            f"cannot open /proc/{process}/fd/{descriptor}, the shared memory that the first rank of this node made: "
            f"{error.strerror}; ranks of a node must run on one machine and see each other's processes (see "
            "ranks_per_node), otherwise use the collective path"
        ) from error
