"""Prices of this machine from what the doctor measured.

They start from the preset named after the device, or else the one whose matrix products are nearest in speed. The
doctor does not measure the laws of experts and attention; only the H200's are known, so on other devices they are
scaled by measured over preset rates of products and memory. Every measured constant then replaces the preset's
(`cost.calibrate`), and `source` lists them. Without GPUs ranks share one machine's memory: its rate stands for all
links inside the node, and the network is no faster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import log
from typing import Any

from equilibra.core.errors import InputError
from equilibra.cost.calibrate import calibrate
from equilibra.cost.presets import name_for_device, prices_named, prices_names
from equilibra.cost.prices import Prices
from equilibra.doctor.finding import Finding, Measured

__all__ = ["Preset", "preset_of"]

MEASURED_PRESET = "h200"
FIELDS = {
    "dense": "dense_tflops", "memory": "hbm_gb_per_s", "host_copy": "host_link_gb_per_s",
    "copy_engine": "copy_engine_gb_per_s", "nvlink": "nvlink_gb_per_s",
}  # fmt: skip
"""field of `Prices` by kind of measurement"""
RANKS_WITHOUT_GPUS = 8
MOST_OVER_SEEN = 1.1
"""limit of a fitted rate over the best measured one: a fit beyond it fits noise"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Prices of this machine, and where they come from."""

    hardware: Prices
    base: str
    """the preset it starts from"""
    measured: list[str]
    """fields measured or read on this machine"""
    scaled: bool
    """whether the laws of experts and attention were scaled"""


def preset_of(findings: Sequence[Finding], measured: Sequence[Measured], *, name: str) -> Preset:
    """Prices of the machine the findings and measurements come from."""
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
        hardware = replace(hardware, nic_gb_per_s=network, kernels=None)  # ours run on GPUs
    return Preset(hardware=hardware, base=base.name, measured=sorted(changes), scaled=scaled)


def _cases(kind: str, measured: Sequence[Measured], *, on_gpu: bool) -> list[dict[str, Any]]:
    """The cases of a kind, under the names `calibrate` knows."""
    cases = [case for one in measured for case in one.cases]
    if on_gpu:
        taken = {"copy_engine": "nvlink"}.get(kind, kind)  # copies between GPUs are made by copy engines
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
    """Constants that are read and not measured."""
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
