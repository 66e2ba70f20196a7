"""Measure this machine in this process, and make prices of the rates.

Measured are matrix products, memory, the host link and copies between GPUs. Each figure is the median of CUDA-event
timings after a warm-up; a case takes a few hundred milliseconds. Without GPUs: an fp32 product and a copy of host
memory, with numpy. Every measurement has two sizes, so that `cost.calibrate` can separate fixed costs from rates.

Prices start from the preset named after the device, or from the one whose matrix products are closest in speed. The
doctor does not measure the laws of experts and attention. Only the H200's are known; other devices scale them by the
measured over the preset rates of products and memory. Measured constants replace the preset's (`cost.calibrate`), and
`source` lists them. Without GPUs, ranks share one machine's memory: its rate stands for all links inside the node, and
the network is no faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import permutations
from math import log
from time import perf_counter
from typing import Any, cast

import numpy as np

from equilibra.core.errors import InputError
from equilibra.cost.calibrate import calibrate
from equilibra.cost.presets import name_for_device, prices_named, prices_names
from equilibra.cost.prices import Prices
from equilibra.doctor.finding import Finding, Measured

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
    """A copy between two devices; cpu is pinned memory. Inside one device, bytes count twice: read and written."""
    import torch

    cases, seconds = [], PAIR_S if kind == "nvlink" else CASE_S
    here = next(device for device in (source, target) if device != "cpu")  # between GPUs, use a stream of the source
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
MEASUREMENTS: dict[str, Measure] = {
    "gpu/dense products": measure_dense,
    "gpu/device copy": partial(measure_copy, "device memory, copied", "device_copy", "cuda", "cuda"),
    "gpu/permuted rows": measure_rows,
    "gpu/host to device": partial(measure_copy, "pinned host to device", "host_copy", "cpu", "cuda"),
    "gpu/device to host": partial(measure_copy, "device to pinned host", "host_copy_back", "cuda", "cpu"),
    "gpu/pairs of gpus": measure_pairs,
    "host/dense products": measure_host_dense,
    "host/host copy": measure_host_copy,
}
"""by name; those of host memory are for machines without a GPU"""


MEASURED_PRESET = "h200"
FIELDS = {
    "dense": "dense_tflops", "memory": "hbm_gb_per_s", "host_copy": "host_link_gb_per_s",
    "copy_engine": "copy_engine_gb_per_s", "nvlink": "nvlink_gb_per_s",
}  # fmt: skip
"""field of `Prices` by kind of measurement"""
RANKS_WITHOUT_GPUS = 8
MOST_OVER_SEEN = 1.1
"""limit of a fitted rate over the best measured one; beyond it, the fit follows noise"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Prices of this machine, and where they come from."""

    hardware: Prices
    base: str
    """the preset it starts from"""
    measured: list[str]
    """fields measured or read on this machine"""


def preset_of(findings: Sequence[Finding], measured: Sequence[Measured], *, name: str) -> Preset:
    """Prices of the machine that was examined."""
    gpus = [finding.values for finding in findings if "capability" in finding.values]
    found = {kind: rates for kind in FIELDS if (rates := _cases(kind, measured, on_gpu=bool(gpus)))}
    fitted = {kind: _rate(kind, cases) for kind, cases in found.items()}
    if not fitted:
        raise InputError("nothing could be measured, so there are no prices to write: see the findings")
    base = _nearest(gpus[0]["device"] if gpus else "", fitted.get("dense"))
    scaled = base.name != MEASURED_PRESET or not gpus
    changes: dict[str, Any] = {FIELDS[kind]: value for kind, value in fitted.items()} | _facts(gpus)
    compute = fitted.get("dense", base.dense_tflops) / base.dense_tflops
    memory = fitted.get("memory", base.hbm_gb_per_s) / base.hbm_gb_per_s
    base_of = base.scaled(compute=compute, memory=memory) if scaled else base
    source = _source(gpus, base, sorted(changes), scaled=scaled)
    hardware = replace(base_of, name=name, source=source, **changes)
    if not gpus:
        network = min(hardware.nic_gb_per_s, hardware.nvlink_gb_per_s)
        hardware = replace(hardware, nic_gb_per_s=network, kernels=None)  # the kernels run on GPUs
    return Preset(hardware=hardware, base=base.name, measured=sorted(changes))


def _cases(kind: str, measured: Sequence[Measured], *, on_gpu: bool) -> list[dict[str, Any]]:
    """The cases of a kind, named as `calibrate` expects."""
    cases = [case for one in measured for case in one.cases]
    if on_gpu:
        taken = {"copy_engine": "nvlink"}.get(kind, kind)  # copy engines copy between GPUs
        return [{**case, "kind": kind} for case in cases if case["kind"] == taken]
    if kind in ("dense", "memory"):
        return [case for case in cases if case["kind"] == kind]
    return [{**case, "kind": kind, "bytes": case["bytes"] // 2} for case in cases if case["kind"] == "memory"]


def _rate(kind: str, cases: list[dict[str, Any]]) -> float:
    """The fitted rate; if timings do not grow with size, the rate of the largest case."""
    amount, per_us = ("flop", 1e-6) if kind == "dense" else ("bytes", 1e-3)
    seen: list[float] = [case[amount] * per_us / case["us"] for case in cases]
    try:
        fitted = calibrate(cases, prices_named(MEASURED_PRESET), name="doctor", source="").hardware
    except InputError:
        return seen[-1]
    return min(float(getattr(fitted, FIELDS[kind])), MOST_OVER_SEEN * max(seen))


def _nearest(device: str, dense_tflops: float | None) -> Prices:
    if name := name_for_device(device):
        return prices_named(name)
    presets = [prices_named(name) for name in prices_names()]
    if dense_tflops is None:
        return prices_named(MEASURED_PRESET)
    return min(presets, key=lambda one: abs(log(one.dense_tflops / dense_tflops)))


def _facts(gpus: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Constants read from the system, not measured."""
    cores = len(os.sched_getaffinity(0))
    if gpus:
        facts: dict[str, Any] = {"memory_bytes": min(int(gpu["total_bytes"]) for gpu in gpus), "planner_cores": cores}
        return facts | ({"ranks_per_node": len(gpus)} if len(gpus) > 1 else {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = max(2, min(RANKS_WITHOUT_GPUS, cores))
    return {"memory_bytes": memory // ranks, "planner_cores": cores, "ranks_per_node": ranks}


def _source(gpus: Sequence[dict[str, Any]], base: Prices, measured: list[str], *, scaled: bool) -> str:
    device = f"{len(gpus)} x {gpus[0]['device']}" if gpus else "a machine without GPUs"
    laws = "scaled by the measured products and memory from" if scaled else "as in"
    kept = [name for name in ("ranks_per_node", "nvlink_gb_per_s", "copy_engine_gb_per_s") if name not in measured]
    others = ", ".join([*kept, "latencies, the network and the rest"])
    return (
        f"equilibra doctor on {device}, {date.today().isoformat()}; measured or read here: {', '.join(measured)}; "  # noqa: DTZ011
        f"experts and attention {laws} the preset {base.name}; {others} as in that preset ({base.source})"
    )
