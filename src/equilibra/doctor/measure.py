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


def measure_copy(name: str, kind: str, source: str, target: str) -> Measured:
    """A copy between two devices; cpu is pinned memory. Inside one device bytes count twice, as read and written."""
    import torch

    cases, seconds = [], PAIR_S if kind == "nvlink" else CASE_S
    here = next(device for device in (source, target) if device != "cpu")  # between GPUs: a stream of the source
    about = {"from": int(source[5:]), "to": int(target[5:])} if kind == "nvlink" else {}
    with torch.cuda.device(here):
        for num_bytes in COPIES:
            old, new = (
                torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
                for device in (source, target)
            )
            timed = _clock(partial(new.copy_, old, non_blocking=True), seconds=seconds)
            cases.append({"kind": kind, "bytes": num_bytes * (1 + (source == target)), **about, **timed})
    return measured_of(name, cases)


def measure_pairs() -> list[Measured]:
    """Copies between every pair of GPUs, one pair at a time."""
    import torch

    pairs = permutations(range(torch.cuda.device_count()), 2)
    return [measure_copy(f"gpu {a} to gpu {b}", "nvlink", f"cuda:{a}", f"cuda:{b}") for a, b in pairs]


def measured_of(name: str, cases: list[dict[str, Any]], *, amount: str = "bytes") -> Measured:
    """The rate of the last case, which must be the largest."""
    largest, per_us = cases[-1], {"bytes": 1e-3, "flop": 1e-6}[amount]
    value, low, high = (largest[amount] * per_us / largest[key] for key in ("us", "us_high", "us_low"))
    return Measured(
        name=name, value=value, unit="TFLOP/s" if amount == "flop" else "GB/s", low=low, high=high,
        repeats=largest["repeats"], cases=cases,
    )  # fmt: skip


def _clock(run: Callable[[], object], *, seconds: float = CASE_S) -> dict[str, Any]:
    """Median and quartiles in microseconds on the current device."""
    import torch

    def once() -> float:
        start, end = (cast("Any", torch.cuda).Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return _repeated(once, seconds)


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
    def once() -> float:
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e6

    run()
    return _repeated(once, HOST_CASE_S)


def _repeated(once: Callable[[], float], seconds: float) -> dict[str, Any]:
    times: list[float] = []
    begin = perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and perf_counter() - begin < seconds):
        times.append(once())
    return summary(times)


def summary(times_us: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of timings."""
    times = sorted(times_us)
    return {
        "us": times[len(times) // 2], "us_low": times[len(times) // 4], "us_high": times[3 * len(times) // 4],
        "repeats": len(times),
    }  # fmt: skip


Measure = Callable[[], Measured | list[Measured]]
GPU_MEASUREMENTS: dict[str, Measure] = {
    "dense products": measure_dense,
    "device copy": partial(measure_copy, "device memory, copied", "device_copy", "cuda", "cuda"),
    "permuted rows": measure_rows,
    "host to device": partial(measure_copy, "pinned host to device", "host_copy", "cpu", "cuda"),
    "device to host": partial(measure_copy, "device to pinned host", "host_copy_back", "cuda", "cpu"),
    "pairs of gpus": measure_pairs,
}
HOST_MEASUREMENTS: dict[str, Measure] = {"dense products": measure_host_dense, "host copy": measure_host_copy}
