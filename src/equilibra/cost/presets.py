"""Hardware presets, by name.

The H200 is measured: `measured/h200.json` is fitted when it is first asked for. Nobody measured the other devices for
us: their constants are the H200's, scaled by the ratio of the vendors' data sheets (dense bf16 FLOP/s and memory
bandwidth), which assumes the same efficiency. Links are data-sheet rates times 0.85 for NVLink and 0.9 for the network,
about what collectives reach; latencies, counts and copy engines are assumptions that a measurement replaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files

from equilibra.core.errors import InputError
from equilibra.cost.calibrate import calibrate
from equilibra.cost.compute import ExpertLaw
from equilibra.cost.hardware import Hardware

__all__ = ["hardware_named", "hardware_names", "measured_h200"]

GB = 10**9
NVLINK, NETWORK = 0.85, 0.9
H200_TFLOPS, H200_HBM = 989.0, 4800.0


def hardware_names() -> list[str]:
    """Names of the presets."""
    return list(_PRESETS)


def hardware_named(name: str) -> Hardware:
    """The preset of that name; an error that lists the names otherwise."""
    if name not in _PRESETS:
        raise InputError(f"no hardware is named {name!r}; use one of {', '.join(_PRESETS)}, or a file of your own")
    return _PRESETS[name]()


def measured_h200() -> list[dict[str, object]]:
    """What was measured on one H200."""
    text = files("equilibra.cost").joinpath("measured/h200.json").read_text()
    measurements: list[dict[str, object]] = json.loads(text)["measurements"]
    return measurements


@cache
def _h200() -> Hardware:
    law = ExpertLaw(fixed_us=0.0, weight_gb_per_s=H200_HBM, row_gb_per_s=H200_HBM, tflops=H200_TFLOPS)
    sheet = Hardware(
        name="h200", source="", memory_bytes=141 * GB, ranks_per_node=8, experts_forward=law, experts_backward=law,
        dense_tflops=H200_TFLOPS, attention_tflops=H200_TFLOPS, attention_backward_tflops=H200_TFLOPS,
        hbm_gb_per_s=H200_HBM, nvlink_gb_per_s=450 * NVLINK, nvlink_latency_us=15.0, nic_gb_per_s=50 * NETWORK,
        nic_latency_us=40.0, host_link_gb_per_s=64.0, copy_engine_gb_per_s=400.0, copy_loss_gb_per_s=H200_HBM,
        counts_us=30.0, planner_cores=32,
    )  # fmt: skip
    source = (
        "compute, memory and host link measured on one H200 (torch 2.11, bf16); NVLink 4 (450 GB/s a direction) and "
        "400 Gb/s a rank from NVIDIA's HGX H200 data sheet"
    )
    return calibrate(measured_h200(), sheet, name="h200", source=source).hardware


def _like_h200(tflops: float, hbm_gb_per_s: float, **changes: object) -> Hardware:
    return _h200().scaled(compute=tflops / H200_TFLOPS, memory=hbm_gb_per_s / H200_HBM, **changes)


@cache
def _h100() -> Hardware:
    source = "NVIDIA H100 SXM data sheet: 989 TFLOP/s, 3.35 TB/s, 80 GB, NVLink 450 GB/s a direction; 400 Gb/s a rank"
    return _like_h200(989.0, 3350.0, name="h100", source=_scaled(source), memory_bytes=80 * GB)


@cache
def _a100() -> Hardware:
    source = "NVIDIA A100 SXM 80 GB data sheet: 312 TFLOP/s, 2.04 TB/s, NVLink 300 GB/s a direction; 200 Gb/s a rank"
    return _like_h200(
        312.0, 2039.0, name="a100", source=_scaled(source), memory_bytes=80 * GB, nvlink_gb_per_s=300 * NVLINK,
        nic_gb_per_s=25 * NETWORK, host_link_gb_per_s=25.0, copy_engine_gb_per_s=250.0,
    )  # fmt: skip


@cache
def _b200() -> Hardware:
    source = "NVIDIA HGX B200 data sheet: 2,250 TFLOP/s, 7.7 TB/s, 180 GB, NVLink 900 GB/s a direction; 400 Gb/s a rank"
    return _like_h200(
        2250.0, 7700.0, name="b200", source=_scaled(source), memory_bytes=180 * GB, nvlink_gb_per_s=900 * NVLINK,
        copy_engine_gb_per_s=800.0,
    )  # fmt: skip


@cache
def _nvl72() -> Hardware:
    source = "NVIDIA GB200 NVL72 data sheet: 72 ranks on NVLink at 900 GB/s a direction, 2,500 TFLOP/s, 8 TB/s, 186 GB"
    return replace(
        _like_h200(2500.0, 8000.0, name="nvl72", source=_scaled(source), memory_bytes=186 * GB, ranks_per_node=72),
        nvlink_gb_per_s=900 * NVLINK, host_link_gb_per_s=200.0, copy_engine_gb_per_s=800.0,
    )  # fmt: skip


def _scaled(source: str) -> str:
    return f"{source}; efficiencies as measured on an H200"


_PRESETS: dict[str, Callable[[], Hardware]] = {
    "a100": _a100, "h100": _h100, "h200": _h200, "b200": _b200, "nvl72": _nvl72,
}  # fmt: skip
