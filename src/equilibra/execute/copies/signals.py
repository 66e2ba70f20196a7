"""Signals between the ranks of a node that their GPUs give and wait for themselves: no host stands in between.

A signal is a number in memory that all ranks of the node have mapped, and only grows. A stream writes it when what was
queued before is done, and a stream waits until it has reached a value: CUDA's stream memory operations. The host sees
the numbers too: on closing it raises all of them, so that no stream waits for a rank that is gone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibra.core.errors import ExecuteError

__all__ = ["Signals", "register_with_device", "unregister"]

GREATER_OR_EQUAL = 0
FOREVER = np.iinfo(np.int64).max


class Signals:
    """Numbers [n] in memory that is registered with CUDA."""

    def __init__(self, values: NDArray[np.int64], device: torch.device) -> None:
        self.values = values
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            _check(_driver().cuMemHostGetDevicePointer_v2(
                ctypes.byref(address), ctypes.c_void_p(values.ctypes.data), ctypes.c_uint(0)
            ), "mapping signals")  # fmt: skip
        self._address = address.value

    def give(self, number: int, value: int, stream: torch.cuda.Stream) -> None:
        """Set a signal when all that the stream has to do by now is done."""
        with torch.cuda.device(stream.device):  # the default stream has no number: it is of the device that is current
            _check(_driver().cuStreamWriteValue64_v2(*self._arguments(number, value, stream)), "giving a signal")

    def wait(self, number: int, value: int, stream: torch.cuda.Stream) -> None:
        """Let the stream wait until a signal has reached a value."""
        with torch.cuda.device(stream.device):
            _check(_driver().cuStreamWaitValue64_v2(*self._arguments(number, value, stream)), "waiting for a signal")

    def _arguments(self, number: int, value: int, stream: torch.cuda.Stream) -> tuple[Any, ...]:
        return (
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._address + 8 * number), ctypes.c_uint64(value),
            ctypes.c_uint(GREATER_OR_EQUAL),
        )  # fmt: skip

    def release(self) -> None:
        """Nobody waits any more."""
        self.values[:] = FOREVER


def register_with_device(memory: torch.Tensor, device: torch.device) -> None:
    """Let a GPU read and write host memory directly, without copies by the host."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        raise ExecuteError(
            f"CUDA cannot register {memory.nbytes / 2**20:.0f} MiB of shared memory (error {int(result)}): raise the "
            "limit of locked memory (ulimit -l), or use another path; `equilibra doctor` tells which work"
        )


def unregister(memory: torch.Tensor, device: torch.device) -> None:
    """The host's alone again."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


@cache
def _driver() -> ctypes.CDLL:
    """CUDA's driver, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise ExecuteError(f"{what} failed with CUDA error {result}: device paths need a driver for CUDA 12 or newer")
