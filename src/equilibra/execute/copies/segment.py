"""One piece of memory per node that all its ranks have mapped.

It has no name once all ranks of the node have opened it: however the processes end, nothing stays behind. Its size is
reserved when it is made, so a full /dev/shm is an error then and not a crash later.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import BudgetError, ExecuteError
from equilibra.execute.group import ExpertGroup

__all__ = ["PAGE", "map_of_node", "pages", "view_of"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point of it
PAGE = 4096
NAME_BYTES = 256


def map_of_node(group: ExpertGroup, num_bytes: int) -> mmap.mmap:
    """Made by the first rank of the node and opened by the others; all ranks of all nodes call."""
    made: list[tuple[int, str]] = []
    opened: list[mmap.mmap] = []

    def create() -> None:
        if group.rank == group.first_of_node:
            made.append(_create(num_bytes))

    def open_it() -> None:
        descriptor = made[0][0] if made else _open_existing(path)
        try:
            opened.append(mmap.mmap(descriptor, num_bytes))
        finally:
            os.close(descriptor)

    try:
        group.all_succeed(create, what="making shared memory of the node")
        name = np.zeros((1, NAME_BYTES), np.uint8)
        if made:
            raw = made[0][1].encode()
            name[0, : len(raw)] = np.frombuffer(raw, np.uint8)
        names = group.gather(name, what="sharing memory of the node")
        path = names[group.index * group.num_ranks + group.first_of_node].tobytes().rstrip(b"\0").decode()
        group.all_succeed(open_it, what="opening shared memory of the node")
    finally:
        for descriptor, made_path in made:
            Path(made_path).unlink(missing_ok=True)
            if not opened:
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


def _create(num_bytes: int) -> tuple[int, str]:
    """A reserved file in memory, open."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="equilibra-", dir=SHARED_MEMORY)
    except OSError as error:
        raise ExecuteError(f"cannot make a shared-memory segment in {SHARED_MEMORY}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        Path(name).unlink()
        raise BudgetError(
            f"the host path needs {num_bytes / 2**20:.0f} MiB of shared memory in {SHARED_MEMORY}: {error.strerror}; "
            "make it larger (docker: --shm-size), or use the collective path"
        ) from error
    return descriptor, name


def _open_existing(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ExecuteError(
            f"cannot open {path}, the shared memory that the first rank of this node made: {error.strerror}; ranks of "
            "a node must run on one machine (see ranks_per_node), otherwise use the collective path"
        ) from error
