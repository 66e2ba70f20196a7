"""Roofline: FLOP and bytes of both passes, the device's measured ceilings, and the share of them that we reach.

Symbols: D width, F inner width, N rows, I instances with rows, b bytes of a value.

             FLOP      bytes that rows move                           bytes of weights and gradients
forward      6 D F N   (2 D + 6 F) b N: x, h twice, a twice, y        3 D F b I
backward     12 D F N  (4 D + 12 F) b N: dy twice, x, dx; da twice,   3 D F (b + 8) I: float32 gradients are read
                       h, dh three times, a twice                     and written

Bytes assume that every product writes its result: a kernel that keeps one on the chip moves less. Ceilings are measured
in the same run: a large product, and a copy inside the device's memory, read and written. The roofline is the larger of
FLOP and bytes at these rates; `reached` is that time over the measured one. Weights that arrive at a rank are read and
written in the device's memory, or cross the host link once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.contenders import BALANCED, ONLINE
from benchmarks.gpu.records import FIELDS, Records
from benchmarks.suite import Row

if TYPE_CHECKING:
    import torch


def pass_flop(hidden: int, ffn: int, rows: float, *, backward: bool) -> float:
    """FLOP of the products of all rows."""
    return (12.0 if backward else 6.0) * hidden * ffn * rows


def pass_bytes(hidden: int, ffn: int, rows: float, instances: float, *, backward: bool, value: int = 2) -> float:
    """Bytes that move through the device's memory."""
    passes, gradients = (2, 8) if backward else (1, 0)
    return passes * (2 * hidden + 6 * ffn) * value * rows + 3 * hidden * ffn * (value + gradients) * instances


def measured_ceilings(device: torch.device, *, repeats: int = 5) -> dict[str, float]:
    """TFLOP/s of a large product, GB/s of copies inside the device and from the host; medians."""
    import torch  # noqa: PLC0415 - tables are made without it

    from benchmarks.gpu.replay import Clock  # noqa: PLC0415

    cuda, clock = device.type == "cuda", Clock(device)
    dtype, side, num_bytes = (torch.bfloat16, 8192, 1 << 30) if cuda else (torch.float32, 256, 1 << 22)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(num_bytes // 4, dtype=torch.uint8, pin_memory=cuda)
    works: dict[str, Callable[[], object]] = {
        "product": lambda: torch.mm(left, right),
        "device": lambda: target.copy_(source, non_blocking=True),
        "host": lambda: target[: num_bytes // 4].copy_(host, non_blocking=True),
    }
    us: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(-1, repeats):
        for name, work in works.items():
            clock.settle()
            start = clock.stamp()
            work()
            end = clock.stamp()
            clock.settle()
            if repeat >= 0:
                us[name].append(max(clock.us(start, end), 1e-3))
    took = {name: float(np.median(times)) for name, times in us.items()}
    return {
        "product_tflops": 2e-6 * side**3 / took["product"],
        "memory_gb_per_s": 2e-3 * num_bytes / took["device"],
        "host_link_gb_per_s": 1e-3 * (num_bytes // 4) / took["host"],
    }


def roofline(records: Records, cases: list[dict[str, Any]], ceilings: dict[str, float], *, value: int) -> list[Row]:
    """A row per shape and pass, over balanced ranks of all its cases; and a row of copies alone."""
    table: list[Row] = []
    for model in dict.fromkeys(case["model"] for case in cases):
        own = [case for case in cases if case["model"] == model]
        rows = np.concatenate([records.of(case["case"], BALANCED) for case in own])
        hidden, ffn = own[0]["hidden"], own[0]["expert_ffn"]
        num_rows, instances = float(rows["rows"].sum()), float(rows["instances"].sum())
        for name, backward in (("forward", False), ("backward", True)):
            us = float(rows[f"{name}_us"].sum(dtype=np.float64))
            flop = pass_flop(hidden, ffn, num_rows, backward=backward)
            moved = pass_bytes(hidden, ffn, num_rows, instances, backward=backward, value=value)
            least_us = max(flop * 1e-6 / ceilings["product_tflops"], moved * 1e-3 / ceilings["memory_gb_per_s"])
            table.append({
                "model": model, "pass": name, "rows_per_rank": num_rows / rows.size,
                "gflop": flop / rows.size * 1e-9, "mb": moved / rows.size * 1e-6, "us": us / rows.size,
                "tflops": flop * 1e-6 / us, "of_product": flop * 1e-6 / us / ceilings["product_tflops"],
                "gb_per_s": moved * 1e-3 / us, "of_memory": moved * 1e-3 / us / ceilings["memory_gb_per_s"],
                "reached": least_us / us,
            })  # fmt: skip
        table += [row for path in ("device", "host") for row in _copies(records, own, path, ceilings)]
    return table


def _copies(records: Records, cases: list[dict[str, Any]], path: str, ceilings: dict[str, float]) -> list[Row]:
    """The row of ranks that receive weights before computing, over one path."""
    own = [case for case in cases if _online_path(case) == path]
    rows = np.concatenate([np.zeros(0, FIELDS), *(records.of(case["case"], ONLINE) for case in own)])
    rows = rows[(rows["copies"] > 0) & (rows["copy_us"] > 0)]
    if not rows.size:
        return []
    times, ceiling = (1, "host_link_gb_per_s") if path == "host" else (2, "memory_gb_per_s")
    us, moved = float(rows["copy_us"].sum(dtype=np.float64)), times * float(rows["bytes"].sum())
    rate = moved * 1e-3 / us
    return [{
        "model": cases[0]["model"], "pass": f"copies, {path}", "mb": moved / rows.size * 1e-6, "us": us / rows.size,
        "gb_per_s": rate, "reached": rate / ceilings[ceiling],
    }]  # fmt: skip


def _online_path(case: dict[str, Any]) -> str | None:
    return next((one["path"] for one in case["contenders"] if one["contender"] == ONLINE), None)
