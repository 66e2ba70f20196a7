"""Checks of the software: Python, torch, CUDA, Triton, and NCCL and gloo, which are run."""

from __future__ import annotations

import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata, util
from typing import Any, cast

from equilibra.doctor.devices import driver_version, load_driver
from equilibra.doctor.finding import Finding, State, first_line, without_gpu

__all__ = ["check_cuda", "check_gloo", "check_nccl", "check_python", "check_torch", "check_triton"]

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
GLOO_TIMEOUT_S = 10


def check_python() -> Finding:
    """Whether Python is new enough."""
    version = sys.version_info[:2]
    text = f"{platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    if version < LEAST_PYTHON:
        return Finding(name="python", state=State.MISSING, text=text, advice="install Python 3.11 or newer")
    return Finding(name="python", state=State.OK, text=text, values={"version": platform.python_version()})


def check_torch() -> Finding:
    """Whether torch is installed, new enough, and built for the machine's devices."""
    try:
        import torch
    except ImportError as error:
        return Finding(
            name="torch", state=State.MISSING, text=first_line(error), advice="pip install 'equilibra[torch]'"
        )
    version, cuda = str(torch.__version__), torch.version.cuda
    text = f"{version}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"
    values = {"version": version, "cuda": cuda}
    if version_pair(version) < LEAST_TORCH:
        return Finding(
            name="torch", state=State.MISSING, text=text, advice="install torch 2.11 or newer", values=values
        )
    if cuda is None and _has_driver():
        advice = "this machine has an NVIDIA driver: install a torch built for CUDA to use it"
        return Finding(name="torch", state=State.WARNING, text=text, advice=advice, values=values)
    return Finding(name="torch", state=State.OK, text=text, values=values)


def check_cuda() -> Finding:
    """Whether the driver supports the CUDA version torch was built for."""
    import torch

    runtime = torch.version.cuda
    try:
        found = driver_version(load_driver())
    except OSError:
        return Finding(name="cuda", state=State.NOT_TESTED, text="no NVIDIA driver here")
    text = f"driver for CUDA {found[0]}.{found[1]}, torch is built for {runtime or 'no CUDA'}"
    values = {"driver": f"{found[0]}.{found[1]}", "runtime": runtime}
    if runtime is not None and found[0] < version_pair(runtime)[0]:
        advice = f"update the driver, or install a torch built for CUDA {found[0]}"
        return Finding(name="cuda", state=State.MISSING, text=text, advice=advice, values=values)
    return Finding(name="cuda", state=State.OK, text=text, values=values)


def check_triton() -> Finding:
    """Whether Triton is installed; it is not run."""
    absent = without_gpu("triton")
    if util.find_spec("triton") is None:
        return absent or Finding(
            name="triton", state=State.WARNING, text="not installed", advice="pip install triton, for fused kernels"
        )
    version = metadata.version("triton")
    state, text = (State.NOT_TESTED, f"{version}; no GPU here") if absent else (State.OK, f"{version} (not run)")
    return Finding(name="triton", state=state, text=text, values={"version": version})


def check_nccl() -> Finding:
    """Sum one number over all GPUs of the machine, in one process."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return without_gpu("nccl") or Finding(
            name="nccl", state=State.MISSING, text="this torch has no NCCL", advice="install a torch with NCCL"
        )
    nccl = cast("Any", torch.cuda.nccl)
    version = ".".join(str(part) for part in nccl.version())
    if not torch.cuda.is_available():
        return Finding(name="nccl", state=State.NOT_TESTED, text=f"{version}; no GPU here")
    count = torch.cuda.device_count()
    ones = [torch.ones(1024, device=f"cuda:{index}") for index in range(count)]
    nccl.all_reduce(ones)
    sums = {float(one.sum()) for one in ones}
    values = {"version": version, "gpus": count}
    if sums != {1024.0 * count}:
        text = f"{version}: a sum over {count} GPU(s) came out as {sorted(sums)}, not {1024 * count}"
        return Finding(name="nccl", state=State.MISSING, text=text, values=values)
    text = f"{version}; summed over {count} GPU{'s' if count > 1 else ''} in one process"
    return Finding(name="nccl", state=State.OK, text=text, values=values)


def check_gloo() -> Finding:
    """Sum a number over two ranks, in two threads that connect over a local socket."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        return Finding(name="gloo", state=State.MISSING, text="this torch has no gloo", advice="install another torch")
    store = cast("Any", distributed).HashStore()
    with ThreadPoolExecutor(2) as threads:
        sums = list(threads.map(lambda rank: _gloo_sum(store, rank), range(2)))
    if sums != [3.0, 3.0]:
        return Finding(name="gloo", state=State.MISSING, text=f"two ranks summed 1 and 2 to {sums}")
    return Finding(name="gloo", state=State.OK, text="two ranks connected and summed")


def version_pair(text: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) if the text has none."""
    parts = [part for part in text.partition("+")[0].split(".")[:2] if part.isdigit()]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (0, 0)


def _gloo_sum(store: Any, rank: int) -> float:  # noqa: ANN401
    import torch
    from torch import distributed

    group = cast("Any", distributed).ProcessGroupGloo(store, rank, 2, timedelta(seconds=GLOO_TIMEOUT_S))
    number = torch.tensor([float(rank + 1)])
    group.allreduce([number]).wait()
    return float(number)


def _has_driver() -> bool:
    try:
        load_driver()
    except OSError:
        return False
    return True
