"""Wait for a word of shared memory without burning a core: Linux futexes, across processes.

Whoever signals writes its data, then the signal, then a new value into the receiver's word, and wakes it. Whoever waits
reads its word, looks for signals, and sleeps only if the word is still the same. So no signal is missed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
from time import monotonic

import numpy as np
from numpy.typing import NDArray

__all__ = ["Word", "supported"]

FUTEX = {"x86_64": 202}
"""number of the system call; elsewhere stores of one process may be seen in another order"""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
SPIN_S = 30e-6
"""time to look again and again before sleeping: a sleep and its end take longer"""
SPIN_ALONE_S = 300e-6
"""the same where every process has a core of its own"""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether processes of this machine can signal each other through shared memory."""
    return os.name == "posix" and platform.machine() in FUTEX


class Word:
    """The word of one receiver."""

    def __init__(self, values: NDArray[np.int32], number: int, *, writer: int, processes: int) -> None:
        """values: in shared memory. writer: number of this process, so that two never write the same value.

        processes: of the engine.
        """
        self._spin_s = SPIN_ALONE_S if len(os.sched_getaffinity(0)) >= processes else SPIN_S
        self._values, self._number, self._writer = values, number, writer
        self._address = ctypes.c_void_p(values.ctypes.data + 4 * number)
        self._call, self._futex = ctypes.CDLL(None).syscall, FUTEX[platform.machine()]
        self._count = itertools.count(1)

    def value(self) -> int:
        return int(self._values[self._number])

    def wake(self) -> None:
        """Wake the receiver after a signal was written."""
        self._values[self._number] = (self._writer << 20 | next(self._count) & 0xFFFFF) & 0x7FFFFFFF
        self._call(self._futex, self._address, FUTEX_WAKE, EVERYBODY, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return once the word differs from `seen`, or after the timeout."""
        end = monotonic() + min(self._spin_s, timeout_s)
        while self.value() == seen:
            os.sched_yield()  # the other process may need this core
            if monotonic() > end:
                limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
                self._call(
                    self._futex, self._address, FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0
                )  # fmt: skip
                return
