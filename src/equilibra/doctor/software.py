"""Checks of the software: Python, torch, CUDA, Triton, and NCCL and gloo, which are run."""

from __future__ import annotations

import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata, util
from typing import Any, cast

from equilibra.doctor.devices import driver_version, load_driver
from equilibra.doctor.finding import Finding, first_line, has_gpu, missing, not_tested, ok, warning

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
GLOO_TIMEOUT_S = 10


def check_python() -> Finding:
    """Whether Python is new enough."""
    text = f"{platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return missing(text, "install Python 3.11 or newer")
    return ok(text, version=platform.python_version())


def check_torch() -> Finding:
    """Whether torch is installed, new enough, and built for the machine's devices."""
    try:
        import torch
    except ImportError as error:
        return missing(first_line(error), "pip install 'equilibra[torch]'")
    version, cuda = str(torch.__version__), torch.version.cuda
    text = f"{version}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"
    if _version_pair(version) < LEAST_TORCH:
        return missing(text, "install torch 2.11 or newer", version=version, cuda=cuda)
    if cuda is None and _has_driver():
        advice = "this machine has an NVIDIA driver: install a torch built for CUDA to use it"
        return warning(text, advice, version=version, cuda=cuda)
    return ok(text, version=version, cuda=cuda)


def check_cuda() -> Finding:
    """Whether the driver supports the CUDA version torch was built for."""
    import torch

    runtime = torch.version.cuda
    try:
        major, minor = driver_version(load_driver())
    except OSError:
        return not_tested("no NVIDIA driver here")
    text = f"driver for CUDA {major}.{minor}, torch is built for {runtime or 'no CUDA'}"
    if runtime is not None and major < _version_pair(runtime)[0]:
        advice = f"update the driver, or install a torch built for CUDA {major}"
        return missing(text, advice, driver=f"{major}.{minor}", runtime=runtime)
    return ok(text, driver=f"{major}.{minor}", runtime=runtime)


def check_triton() -> Finding:
    """Whether Triton is installed; it is not run."""
    gpu = has_gpu()
    if util.find_spec("triton") is None:
        return warning("not installed", "pip install triton, for fused kernels") if gpu else not_tested("no GPU here")
    version = metadata.version("triton")
    found, note = (ok, " (not run)") if gpu else (not_tested, "; no GPU here")
    return found(f"{version}{note}", version=version)


def check_nccl() -> Finding:
    """Sum one number over all GPUs of the machine, in one process."""
    import torch
    from torch import distributed

    gpu = has_gpu()
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return missing("this torch has no NCCL", "install a torch with NCCL") if gpu else not_tested("no GPU here")
    nccl = cast("Any", torch.cuda.nccl)
    version = ".".join(str(part) for part in nccl.version())
    if not gpu:
        return not_tested(f"{version}; no GPU here")
    count = torch.cuda.device_count()
    ones = [torch.ones(1024, device=f"cuda:{index}") for index in range(count)]
    nccl.all_reduce(ones)
    sums = {float(one.sum()) for one in ones}
    if sums != {1024.0 * count}:
        text = f"{version}: a sum over {count} GPU(s) came out as {sorted(sums)}, not {1024 * count}"
        return missing(text, version=version, gpus=count)
    text = f"{version}; summed over {count} GPU{'s' if count > 1 else ''} in one process"
    return ok(text, version=version, gpus=count)


def check_gloo() -> Finding:
    """Sum a number over two ranks, in two threads that connect over a local socket."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        return missing("this torch has no gloo", "install another torch")
    store = cast("Any", distributed).HashStore()
    with ThreadPoolExecutor(2) as threads:
        sums = list(threads.map(lambda rank: _gloo_sum(store, rank), range(2)))
    right = sums == [3.0, 3.0]
    return ok("two ranks connected and summed") if right else missing(f"two ranks summed 1 and 2 to {sums}")


def _version_pair(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


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
