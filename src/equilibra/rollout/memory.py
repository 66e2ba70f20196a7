"""Shared memory without a name, and words in it that processes sleep on.

One process creates a segment; others on the machine open it by its location. Sleeping uses Linux futexes: a sender
writes its data, then the signal, then a new value into the receiver's word, and wakes it. A receiver reads its word,
looks for signals, and sleeps only if the word is unchanged, so no signal is missed.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
from time import monotonic
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.execute.copies.segment import create_segment, open_segment, pages, view_of

FUTEX = {"x86_64": 202}
"""system call number; other architectures may reorder the stores of a process"""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
SPIN_S = 30e-6
"""polling time before sleeping, which costs more than that"""
SPIN_ALONE_S = 300e-6
"""polling time where every process has a core of its own"""


class Where(NamedTuple):
    """Location of a segment."""

    process: int
    descriptor: int
    inode: int
    num_bytes: int


class Memory:
    """A mapped segment; it lives as long as any process maps it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self.num_bytes = descriptor, num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)

    @classmethod
    def create(cls, num_bytes: int, *, instead: str = "use another engine") -> Self:
        """instead: advice if there is not enough shared memory."""
        size = pages(num_bytes)
        return cls(create_segment(size, user="the rollout engine", instead=instead), size)

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
        return np.ndarray(shape, dtype, self._map, at)

    def __del__(self) -> None:
        os.close(self._descriptor)  # views keep the mapping


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def can_signal() -> bool:
    """Whether processes on this machine can signal each other through shared memory."""
    return os.name == "posix" and platform.machine() in FUTEX


class Word:
    """The word that one receiver sleeps on."""

    def __init__(self, values: NDArray[np.int32], number: int, *, writer: int, processes: int) -> None:
        """values: in shared memory. writer: this process; no two write the same value. processes: of the engine."""
        self._spin_s = SPIN_ALONE_S if len(os.sched_getaffinity(0)) >= processes else SPIN_S
        self._values, self._number, self._writer = values, number, writer
        self._address = ctypes.c_void_p(values.ctypes.data + 4 * number)
        self._call, self._futex = ctypes.CDLL(None).syscall, FUTEX[platform.machine()]
        self._count = itertools.count(1)

    def value(self) -> int:
        return int(self._values[self._number])

    def wake(self) -> None:
        """Wake the receiver; call it after writing a signal."""
        self._values[self._number] = (self._writer << 20 | next(self._count) & 0xFFFFF) & 0x7FFFFFFF
        self._call(self._futex, self._address, FUTEX_WAKE, EVERYBODY, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return once the word differs from `seen`, or after the timeout."""
        end = monotonic() + min(self._spin_s, timeout_s)
        while self.value() == seen:
            os.sched_yield()  # the other process may need this core
            if monotonic() > end:
                limit, old = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)), ctypes.c_uint32(seen)
                self._call(self._futex, self._address, FUTEX_WAIT, old, ctypes.byref(limit), None, 0)
                return
