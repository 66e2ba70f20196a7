"""Shared memory without a name: one process makes it, others of the machine open it by where it is."""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.execute.copies.segment import create_segment, open_segment, pages, view_of

__all__ = ["Memory", "Where"]


class Where(NamedTuple):
    """Where to open a memory."""

    process: int
    descriptor: int
    inode: int
    num_bytes: int


class Memory:
    """A mapped segment. It lives as long as any process has it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self.num_bytes = descriptor, num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)

    @classmethod
    def create(cls, num_bytes: int, *, instead: str = "use another engine") -> Self:
        """instead: what to do if there is not so much."""
        size = pages(num_bytes)
        made = create_segment(size, user="the rollout engine", instead=instead)
        return cls(made, size)

    @classmethod
    def open(cls, where: Where) -> Self:
        try:
            return cls(open_segment(*where[:3]), where.num_bytes)
        except OSError as error:
            raise ExecuteError(
                f"cannot open shared memory of process {where.process}: {error.strerror}; attention and expert "
                "processes must run on one machine and see each other's processes"
            ) from error

    @property
    def where(self) -> Where:
        return Where(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, self.num_bytes)

    def tensor(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return view_of(self._map, at, shape, dtype)

    def numpy(self, at: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype, count, at).reshape(shape)

    def close(self) -> None:
        """Close the descriptor; views keep the mapping."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()
