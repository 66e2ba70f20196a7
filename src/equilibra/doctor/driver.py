"""The CUDA driver through ctypes: the few calls that torch does not offer."""

from __future__ import annotations

import ctypes

__all__ = ["DriverError", "call", "driver_version", "load_driver"]

LIBRARY = "libcuda.so.1"


class DriverError(RuntimeError):
    """A call of the driver that did not return 0."""


def load_driver() -> ctypes.CDLL:
    """The driver's library; OSError where there is none."""
    return ctypes.CDLL(LIBRARY)


def driver_version(driver: ctypes.CDLL) -> tuple[int, int]:
    """The newest CUDA version that the driver supports."""
    found = ctypes.c_int(0)
    call(driver, "cuDriverGetVersion", ctypes.byref(found))
    return found.value // 1000, found.value % 1000 // 10


def call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the driver; an error with its name and the driver's word for what went wrong otherwise."""
    code = int(getattr(driver, name)(*arguments))
    if code == 0:
        return
    word = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(word))
    raise DriverError(f"{name} answered {code} ({(word.value or b'unknown').decode()})")
