"""One piece of memory per node that all its ranks have mapped.

It never has a name: the others open it through the process that made it, and however the processes end, nothing stays
behind. Its size is reserved when it is made, so a full /dev/shm is an error then and not a crash later.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import BudgetError, ExecuteError
from equilibra.execute.group import ExpertGroup

__all__ = ["PAGE", "map_of_node", "pages", "view_of"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point of it
PAGE = 4096


def map_of_node(group: ExpertGroup, num_bytes: int) -> mmap.mmap:
    """Made by the first rank of the node and opened by the others; all ranks of all nodes call."""
    made: list[int] = []
    opened: list[mmap.mmap] = []

    def create() -> None:
        if group.rank == group.first_of_node:
            made.append(_create(num_bytes))

    def open_it() -> None:
        descriptor = made[0] if made else _open_existing(*where)
        try:
            opened.append(mmap.mmap(descriptor, num_bytes))
        finally:
            if not made:
                os.close(descriptor)

    try:
        group.all_succeed(create, what="making shared memory of the node")
        mine = [os.getpid(), made[0], os.fstat(made[0]).st_ino] if made else [0, 0, 0]
        every = group.gather(np.array(mine, np.int64), what="sharing memory of the node")
        where = every[group.index * group.num_ranks + group.first_of_node].tolist()
        group.all_succeed(open_it, what="opening shared memory of the node")
    finally:
        for descriptor in made:
            os.close(descriptor)
    return opened[0]


def pages(num_bytes: int) -> int:
    """Bytes in whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def view_of(memory: mmap.mmap, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in the memory."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)


def _create(num_bytes: int) -> int:
    """A reserved file in memory, open, without a name."""
    try:
        descriptor = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ExecuteError(f"cannot make a shared-memory segment in {SHARED_MEMORY}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise BudgetError(
            f"the host path needs {num_bytes / 2**20:.0f} MiB of shared memory in {SHARED_MEMORY}: {error.strerror}; "
            "make it larger (docker: --shm-size), or use the collective path"
        ) from error
    return descriptor


def _open_existing(process: int, descriptor: int, inode: int) -> int:
    """What another process of this machine has open; `inode` tells it from anything else."""
    path = f"/proc/{process}/fd/{descriptor}"
    why = "it is another file"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(opened).st_ino == inode:
            return opened
        os.close(opened)
    except OSError as error:
        why = str(error.strerror)
    raise ExecuteError(
        f"cannot open {path}, the shared memory that the first rank of this node made: {why}; ranks of a node must run "
        "on one machine and see each other's processes (see ranks_per_node), otherwise use the collective path"
    )
