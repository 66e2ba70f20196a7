"""Measure the GPUs in this process: matrix products, memory, the host link, copies between GPUs.

Every figure is the median of CUDA-event timings after a warm-up; a case takes a few hundred milliseconds. Without GPUs:
an fp32 product and a copy of host memory, with numpy. Everything has two sizes, so that `cost.calibrate` can separate
fixed costs from rates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from time import perf_counter
from typing import Any, cast

import numpy as np

from equilibra.doctor.finding import Measured

__all__ = ["GPU_MEASUREMENTS", "HOST_MEASUREMENTS", "measured_of"]

MIB = 2**20
CASE_S, PAIR_S, HOST_CASE_S = 0.2, 0.04, 0.3
FEWEST, MOST = 5, 100
PRODUCTS = (4096, 8192)
COPIES = (32 * MIB, 256 * MIB)
ROWS, HIDDEN = (32_768, 131_072), 2048
HOST_PRODUCTS, HOST_COPIES = (512, 1024), (32 * MIB, 128 * MIB)


def measure_dense() -> Measured:
    """A large bf16 matrix product."""
    import torch

    cases = []
    for width in PRODUCTS:
        left, right = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        cases.append({"kind": "dense", "flop": 2 * width**3, **_clock(partial(torch.mm, left, right, out=out))})
    return measured_of("dense bf16 products", cases, amount="flop")


def measure_device_copy() -> Measured:
    """A copy inside device memory: bytes read and written."""
    import torch

    cases = []
    for num_bytes in COPIES:
        source, target = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        cases.append({"kind": "device_copy", "bytes": 2 * num_bytes, **_clock(partial(target.copy_, source))})
    return measured_of("device memory, copied", cases)


def measure_rows() -> Measured:
    """Permuted rows, as in dispatch: bytes read and written."""
    import torch

    cases = []
    for rows in ROWS:
        tokens_TD = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        order_T, out_TD = torch.randperm(rows, device="cuda"), torch.empty_like(tokens_TD)
        timed = _clock(partial(torch.index_select, tokens_TD, 0, order_T, out=out_TD))
        cases.append({"kind": "memory", "bytes": 2 * tokens_TD.nbytes, **timed})
    return measured_of("device memory, rows permuted", cases)


def measure_to_device() -> Measured:
    """A copy from pinned host memory to the device."""
    return _host_link("pinned host to device", "host_copy", to_device=True)


def measure_to_host() -> Measured:
    """A copy from the device to pinned host memory."""
    return _host_link("device to pinned host", "host_copy_back", to_device=False)


def measure_pairs() -> list[Measured]:
    """Copies between every pair of GPUs, one pair at a time."""
    import torch

    return [_pair(a, b) for a, b in permutations(range(torch.cuda.device_count()), 2)]


def measured_of(name: str, cases: list[dict[str, Any]], *, amount: str = "bytes") -> Measured:
    """The rate of the last case, which must be the largest."""
    largest, per_us = cases[-1], {"bytes": 1e-3, "flop": 1e-6}[amount]
    value, low, high = (largest[amount] * per_us / largest[key] for key in ("us", "us_high", "us_low"))
    return Measured(
        name=name, value=value, unit="TFLOP/s" if amount == "flop" else "GB/s", low=low, high=high,
        repeats=largest["repeats"], cases=cases,
    )  # fmt: skip


def _host_link(name: str, kind: str, *, to_device: bool) -> Measured:
    import torch

    cases = []
    for num_bytes in COPIES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        target, source = (device, host) if to_device else (host, device)
        cases.append({"kind": kind, "bytes": num_bytes, **_clock(partial(target.copy_, source, non_blocking=True))})
    return measured_of(name, cases)


def _pair(a: int, b: int) -> Measured:
    import torch

    cases = []
    with torch.cuda.device(a):  # a copy between devices runs on a stream of its source
        for num_bytes in COPIES:
            source = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{a}")
            target = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{b}")
            timed = _clock(partial(target.copy_, source, non_blocking=True), seconds=PAIR_S)
            cases.append({"kind": "nvlink", "bytes": num_bytes, "from": a, "to": b, **timed})
    return measured_of(f"gpu {a} to gpu {b}", cases)


def _clock(run: Callable[[], object], *, seconds: float = CASE_S) -> dict[str, Any]:
    """Median and quartiles in microseconds on the current device."""
    import torch

    event = partial(cast("Any", torch.cuda).Event, enable_timing=True)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and perf_counter() - begin < seconds):
        start, end = event(), event()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return summary(times)


def measure_host_dense() -> Measured:
    """An fp32 matrix product."""
    cases, rng = [], np.random.default_rng(0)
    for width in HOST_PRODUCTS:
        left, right = (rng.standard_normal((width, width), np.float32) for _ in range(2))
        timed = _host_clock(partial(np.matmul, left, right, out=np.empty_like(left)))
        cases.append({"kind": "dense", "flop": 2 * width**3, **timed})
    return measured_of("dense fp32 products (cpu)", cases, amount="flop")


def measure_host_copy() -> Measured:
    """A copy of host memory by one thread: bytes read and written."""
    cases = []
    for num_bytes in HOST_COPIES:
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        cases.append({"kind": "memory", "bytes": 2 * num_bytes, **_host_clock(partial(np.copyto, target, source))})
    return measured_of("host memory, copied", cases)


def _host_clock(run: Callable[[], object]) -> dict[str, Any]:
    run()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and perf_counter() - begin < HOST_CASE_S):
        start = perf_counter()
        run()
        times.append((perf_counter() - start) * 1e6)
    return summary(times)


def summary(times_us: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of timings."""
    times = sorted(times_us)
    return {
        "us": times[len(times) // 2], "us_low": times[len(times) // 4], "us_high": times[3 * len(times) // 4],
        "repeats": len(times),
    }  # fmt: skip


GPU_MEASUREMENTS: dict[str, Callable[[], Measured | list[Measured]]] = {
    "dense products": measure_dense,
    "device copy": measure_device_copy,
    "permuted rows": measure_rows,
    "host to device": measure_to_device,
    "device to host": measure_to_host,
    "pairs of gpus": measure_pairs,
}
HOST_MEASUREMENTS: dict[str, Callable[[], Measured | list[Measured]]] = {
    "dense products": measure_host_dense,
    "host copy": measure_host_copy,
}
