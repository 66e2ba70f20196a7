"""Stream memory operations: a stream waits for a value in device memory that another stream writes. No kernel runs.

The value is waited for before it is written, so the check sees both: that the wait holds the stream back, and that the
write lets it go. The host only polls, with a limit; a stream that never moves ends with the process.
"""

from __future__ import annotations

import ctypes
import os
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, cast

from equilibra.doctor.driver import call, load_driver
from equilibra.doctor.finding import Finding, State, without_gpu

if TYPE_CHECKING:
    import torch

__all__ = ["check_stream_values"]

NAME = "stream values"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
VALUE = 7
FLAG_WAIT_UNTIL_AT_LEAST, FLAG_WRITE = 0, 0
HELD_S, LIMIT_S = 0.05, 5.0


def check_stream_values() -> Finding:
    """Wait for a value on one stream, write it on another."""
    import torch

    if absent := without_gpu(NAME):
        return absent
    driver, cuda = load_driver(), cast("Any", torch.cuda)
    flag = torch.zeros(1, dtype=torch.int64, device="cuda")
    waiting, writing, passed = cuda.Stream(), cuda.Stream(), cuda.Event()
    torch.cuda.synchronize()
    _value(driver, "Wait", waiting, flag, FLAG_WAIT_UNTIL_AT_LEAST)
    passed.record(waiting)
    sleep(HELD_S)
    held = not passed.query()
    _value(driver, "Write", writing, flag, FLAG_WRITE)
    if not _happens(passed, LIMIT_S):
        return _stuck()
    written = int(flag.item())
    if not held:
        return Finding(name=NAME, state=State.MISSING, text="a stream did not wait for a value that was not there yet")
    if written != VALUE:
        return Finding(name=NAME, state=State.MISSING, text=f"{written} was found where {VALUE} was written")
    return Finding(name=NAME, state=State.OK, text="a stream waited for a value that another stream wrote")


def _stuck() -> Finding:
    """The write never got past the wait."""
    text = f"a stream still waited {LIMIT_S:g} s after the value was written"
    setting = os.environ.get(QUEUES)
    advice = f"{QUEUES}={setting} makes streams wait for each other; take it out and try again" if setting else ""
    return Finding(name=NAME, state=State.MISSING, text=text, advice=advice)


def _value(driver: ctypes.CDLL, what: str, stream: torch.cuda.Stream, flag: torch.Tensor, mode: int) -> None:
    """cuStreamWaitValue64 or cuStreamWriteValue64."""
    name = f"cuStream{what}Value64"
    if hasattr(driver, f"{name}_v2"):  # the first version needs a setting of the driver
        name += "_v2"
    address, value = ctypes.c_uint64(flag.data_ptr()), ctypes.c_uint64(VALUE)
    call(driver, name, ctypes.c_void_p(stream.cuda_stream), address, value, ctypes.c_uint(mode))


def _happens(event: Any, limit_s: float) -> bool:  # noqa: ANN401
    end = monotonic() + limit_s
    while not event.query():
        if monotonic() > end:
            return False
        sleep(0.001)
    return True
