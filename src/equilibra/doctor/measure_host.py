"""Measure a machine without GPUs: an fp32 product and a copy of host memory, with numpy, as one rank would use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from equilibra.doctor.finding import Measured
from equilibra.doctor.measure import measured_of, summary

__all__ = ["HOST_MEASUREMENTS"]

MIB = 2**20
CASE_S = 0.3
FEWEST, MOST = 5, 100
PRODUCTS = (512, 1024)
COPIES = (32 * MIB, 128 * MIB)


def measure_dense() -> Measured:
    """An fp32 matrix product."""
    cases, rng = [], np.random.default_rng(0)
    for width in PRODUCTS:
        left, right = (rng.standard_normal((width, width), np.float32) for _ in range(2))
        timed = _clock(partial(np.matmul, left, right, out=np.empty_like(left)))
        cases.append({"kind": "dense", "flop": 2 * width**3, **timed})
    return measured_of("dense fp32 products (cpu)", cases, amount="flop")


def measure_copy() -> Measured:
    """One thread copies host memory: bytes read and written."""
    cases = []
    for num_bytes in COPIES:
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        cases.append({"kind": "memory", "bytes": 2 * num_bytes, **_clock(partial(np.copyto, target, source))})
    return measured_of("host memory, copied", cases)


def _clock(run: Callable[[], object]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    run()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and perf_counter() - begin < CASE_S):
        start = perf_counter()
        run()
        times.append((perf_counter() - start) * 1e6)
    return summary(times)


HOST_MEASUREMENTS: dict[str, Callable[[], Measured | list[Measured]]] = {
    "dense products": measure_dense,
    "host copy": measure_copy,
}
