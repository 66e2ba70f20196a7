"""Checks of the GPUs: what they are, and whether they can read each other's memory."""

from __future__ import annotations

from itertools import permutations
from typing import Any, cast

from equilibra.doctor.driver import load_driver
from equilibra.doctor.finding import Finding, State, first_line, without_gpu

__all__ = ["check_gpus", "check_peers"]

GIB = 2**30
LITTLE = 0.5
"""share of free memory below which somebody else uses the device"""


def check_gpus() -> list[Finding]:
    """One finding per GPU."""
    import torch

    if absent := without_gpu("gpu"):
        return [_unseen() or absent]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def check_peers() -> Finding:
    """Which GPUs can reach which."""
    import torch

    if absent := without_gpu("peer access"):
        return absent
    count = torch.cuda.device_count()
    if count < 2:
        return Finding(name="peer access", state=State.NOT_TESTED, text="one GPU: there is no pair to try")
    pairs = list(permutations(range(count), 2))
    without = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    values = {"pairs": len(pairs), "without": without}
    if not without:
        text = f"all {len(pairs)} pairs of {count} GPUs"
        return Finding(name="peer access", state=State.OK, text=text, values=values)
    some = ", ".join(f"{a}→{b}" for a, b in without[:6])
    return Finding(
        name="peer access", state=State.MISSING, text=f"not {len(without)} of {len(pairs)} pairs: {some}",
        advice="copies between these go through host memory; check ACS and IOMMU settings, or the container's devices",
        values=values,
    )  # fmt: skip


def _unseen() -> Finding | None:
    """What keeps torch from using a driver that is here; None where there is none."""
    import torch

    try:
        load_driver()
    except OSError:
        return None
    try:
        cast("Any", torch.cuda).init()
    except (RuntimeError, AssertionError) as error:
        text = f"there is an NVIDIA driver, but {first_line(error)}"
        advice = "does nvidia-smi show the GPUs? check CUDA_VISIBLE_DEVICES and the container's devices"
        return Finding(name="gpu", state=State.MISSING, text=text, advice=advice)
    return None


def _gpu(index: int) -> Finding:
    import torch

    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    values = {
        "index": index, "device": about.name, "total_bytes": total, "free_bytes": free,
        "capability": [about.major, about.minor],
    }  # fmt: skip
    text = f"{about.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, sm_{about.major}{about.minor}"
    name = f"gpu {index}"
    if free < LITTLE * total:
        advice = "somebody else uses it: measured rates will be too low"
        return Finding(name=name, state=State.WARNING, text=text, advice=advice, values=values)
    return Finding(name=name, state=State.OK, text=text, values=values)
