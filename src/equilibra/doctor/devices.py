"""Checks of the GPUs: memory, peer access, NVLink, compute mode, CUDA IPC, and stream memory operations.

This file is also the other process of the CUDA IPC check.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
from itertools import permutations
from multiprocessing.reduction import ForkingPickler
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, cast

from equilibra.doctor.finding import Finding, first_line, has_gpu, missing, not_tested, ok, warning

if TYPE_CHECKING:
    import torch

LIBRARY = "libcuda.so.1"


class DriverError(RuntimeError):
    """A driver call that did not return 0."""


def load_driver() -> ctypes.CDLL:
    """The CUDA driver's library, for the few calls torch does not offer; OSError if the machine has none."""
    return ctypes.CDLL(LIBRARY)


def driver_version(driver: ctypes.CDLL) -> tuple[int, int]:
    """The newest CUDA version the driver supports."""
    found = ctypes.c_int(0)
    call(driver, "cuDriverGetVersion", ctypes.byref(found))
    return found.value // 1000, found.value % 1000 // 10


def call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a driver function; DriverError with the driver's name of the error if it fails."""
    code = int(getattr(driver, name)(*arguments))
    if code == 0:
        return
    word = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(word))
    raise DriverError(f"{name} returned {code} ({(word.value or b'unknown').decode()})")


GIB = 2**30
LITTLE = 0.5
"""share of free memory below which another process must be using the device"""


def check_gpus() -> list[Finding]:
    """One finding per GPU: its name, free memory and compute capability."""
    import torch

    if not has_gpu():
        return [_unseen() or not_tested("no GPU here")]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def check_peers() -> Finding:
    """Whether every GPU can access every other's memory."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return not_tested("only one GPU: no pair to test")
    pairs = list(permutations(range(count), 2))
    without = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not without:
        return ok(f"all {len(pairs)} pairs of {count} GPUs", pairs=len(pairs), without=without)
    some = ", ".join(f"{a}→{b}" for a, b in without[:6])
    return missing(
        f"{len(without)} of {len(pairs)} pairs have none: {some}",
        "copies between them go through host memory; check ACS and IOMMU settings, or the container's devices",
        pairs=len(pairs), without=without,
    )  # fmt: skip


def _unseen() -> Finding | None:
    """Why torch cannot use the installed driver; None if there is no driver, or no problem."""
    import torch

    try:
        load_driver()
    except OSError:
        return None
    try:
        cast("Any", torch.cuda).init()
    except (RuntimeError, AssertionError) as error:
        advice = "does nvidia-smi show the GPUs? check CUDA_VISIBLE_DEVICES and the container's devices"
        return missing(f"there is an NVIDIA driver, but {first_line(error)}", advice)
    return None


def _gpu(index: int) -> Finding:
    import torch

    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = ok if free >= LITTLE * total else warning
    return found(
        f"{about.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, sm_{about.major}{about.minor}",
        "" if found is ok else "another process uses it: measured rates will be too low", name=f"gpu {index}",
        index=index, device=about.name, total_bytes=total, free_bytes=free, capability=[about.major, about.minor],
    )  # fmt: skip


# nvidia-smi: its reports are meant for people and change between versions, so lines of unknown form are skipped.


TIMEOUT_S = 15
STYLE = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU(\d+)$")
HEADING = re.compile(r"GPU (\d+):")
RATE = re.compile(r"Link (\d+):\s*([\d.]+)\s*GB/s")
LINK = re.compile(r"NV(\d+)$")


class ToolError(RuntimeError):
    """`nvidia-smi` is missing or failed."""


def check_nvlink() -> Finding:
    """How many pairs of GPUs are connected by NVLink."""
    try:
        pairs = topology(_ask("topo", "-m"))
    except ToolError as error:
        return not_tested(str(error))
    try:
        rates = link_rates(_ask("nvlink", "-s"))
    except ToolError:  # older drivers lack this report; the matrix is enough
        rates = {}
    totals = {gpu: round(sum(links), 1) for gpu, links in rates.items() if links}
    said = f"; {min(totals.values()):g} GB/s per GPU and direction" if totals else ""
    values: dict[str, Any] = {
        "pairs": [{"from": a, "to": b, "by": by} for (a, b), by in sorted(pairs.items())],
        "gb_per_s_of_gpu": {str(gpu): total for gpu, total in totals.items()},
    }
    if not pairs:
        return not_tested(f"no pair of GPUs{said}", **values)
    linked = sum(LINK.match(by) is not None for by in pairs.values())
    text = f"{linked} of {len(pairs)} pairs ({', '.join(sorted(set(pairs.values())))}){said}"
    if linked == len(pairs):
        return ok(text, **values)
    advice = "copies between the others go over slower PCIe; use --write so that the simulator knows"
    return warning(text, advice, **values)


def check_sharing() -> Finding:
    """Whether several processes may use one GPU."""
    try:
        modes = {line.strip() for line in _ask("--query-gpu=compute_mode", "--format=csv,noheader").splitlines()} - {""}
    except ToolError as error:
        return not_tested(str(error))
    text = f"compute mode {', '.join(sorted(modes)) or 'unknown'}"
    if modes == {"Default"}:
        return ok(f"{text}: several processes may share a GPU over gloo or CUDA IPC; NCCL needs one each")
    return warning(text, "start one process per GPU, or set the mode with nvidia-smi -c DEFAULT")


def topology(report: str) -> dict[tuple[int, int], str]:
    """Connection of each pair of GPUs (NV18, PIX, SYS, ...), from `nvidia-smi topo -m`."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in STYLE.sub("", report).splitlines():
        words = line.split()
        gpus = [int(match[1]) for word in words if (match := GPU.match(word))]
        if not words or not gpus:
            continue
        row = GPU.match(words[0])
        if row is None or len(gpus) > 1 or not columns:
            columns = gpus  # the heading: names of columns only
            continue
        cells = words[1 : 1 + len(columns)]
        found |= {(int(row[1]), column): cell for column, cell in zip(columns, cells, strict=False) if cell != "X"}
    return found


def link_rates(report: str) -> dict[int, list[float]]:
    """GB/s of each active link of each GPU, from `nvidia-smi nvlink -s`."""
    found: dict[int, list[float]] = {}
    gpu: int | None = None
    for line in report.splitlines():
        if heading := HEADING.search(line):
            gpu = int(heading[1])
            found[gpu] = []
        elif gpu is not None and (rate := RATE.search(line)):
            found[gpu].append(float(rate[2]))
    return found


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            ["nvidia-smi", *words],  # noqa: S607 - wherever the driver put it
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ToolError("nvidia-smi is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"nvidia-smi did not answer within {TIMEOUT_S} s") from error
    except OSError as error:
        raise ToolError(f"nvidia-smi cannot be run: {first_line(error)}") from error
    if done.returncode != 0:
        raise ToolError(f"nvidia-smi exited with {done.returncode}: {first_line(done.stderr or done.stdout)}")
    return done.stdout


# CUDA IPC: another process opens a tensor of this one, reads it and writes it. The handle is torch.multiprocessing's
# reduction of the tensor. With several GPUs the other process reads it from its last GPU, so the copy crosses devices.

NUM_VALUES = 2**18
IPC_TIMEOUT_S = 45
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_ipc() -> Finding:
    """Whether another process can read and write a tensor of this one."""
    setting = expandable_segments()
    advice = f"remove expandable_segments from {setting}: it can break CUDA IPC" if setting else ""
    try:
        text = _shared()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return missing(
            first_line(error), advice or "in a container, share the IPC and PID namespaces (docker: --ipc=host)"
        )
    return (warning if advice else ok)(text, advice)


def expandable_segments() -> str:
    """Name of the environment variable that enables expandable segments; empty if none does."""
    for name in SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return name
    return ""


def _shared() -> str:
    """Run the exchange; returns what was exchanged, raises if it failed."""
    import torch
    from torch.multiprocessing import reductions

    tensor = torch.arange(NUM_VALUES, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    handle = bytes(ForkingPickler.dumps(cast("Any", reductions).reduce_tensor(tensor)))
    command = [sys.executable, "-m", "equilibra.doctor.devices"]
    done = subprocess.run(command, input=handle, capture_output=True, timeout=IPC_TIMEOUT_S, check=False)  # noqa: S603
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"the other process exited with {done.returncode}: {said[-1] if said else 'no message'}")
    (read, device), right = pickle.loads(done.stdout), NUM_VALUES * (NUM_VALUES - 1) // 2  # noqa: S301 - our own child
    torch.cuda.synchronize()
    if read != right:
        raise RuntimeError(f"the other process read a sum of {read}, not {right}")
    if not bool((tensor == torch.arange(NUM_VALUES, device="cuda") + 1).all()):
        raise RuntimeError("what the other process wrote did not arrive")
    where = "one GPU" if device == tensor.get_device() else f"GPUs {tensor.get_device()} and {device}"
    return f"two processes read and wrote one tensor, on {where}"


def answer() -> None:
    """In the other process: open the tensor from the handle on stdin, add 1, write its sum and our device to stdout."""
    import torch

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answer
    rebuild, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    tensor = rebuild(*arguments)
    device = torch.cuda.device_count() - 1
    total = int(tensor.to(f"cuda:{device}").sum())
    tensor.add_(1)
    torch.cuda.synchronize(tensor.device)
    out.write(pickle.dumps((total, device)))
    out.close()


# Stream memory operations. The wait is queued before the write, so the check sees that the wait holds the stream back
# and that the write releases it. The host polls up to a limit; a stream that never moves ends with the process.

STREAM_VALUES = "stream values"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
VALUE = 7
FLAG_WAIT_UNTIL_AT_LEAST, FLAG_WRITE = 0, 0
HELD_S, LIMIT_S = 0.05, 5.0


def check_stream_values() -> Finding:
    """Whether a stream can wait for a value in device memory that another stream writes."""
    import torch

    driver, cuda = load_driver(), cast("Any", torch.cuda)
    flag = torch.zeros(1, dtype=torch.int64, device="cuda")
    waiting, writing, passed = cuda.Stream(), cuda.Stream(), cuda.Event()
    torch.cuda.synchronize()
    _value(driver, "Wait", waiting, flag, FLAG_WAIT_UNTIL_AT_LEAST)
    passed.record(waiting)
    sleep(HELD_S)
    held = not passed.query()
    _value(driver, "Write", writing, flag, FLAG_WRITE)
    if not _happens(passed, LIMIT_S):
        return _stuck()
    written = int(flag.item())
    if not held:
        return missing("a stream did not wait for a value")
    if written != VALUE:
        return missing(f"read {written} where {VALUE} was written")
    return ok("a stream waited for a value that another stream wrote")


def _stuck() -> Finding:
    setting = os.environ.get(QUEUES)
    advice = f"{QUEUES}={setting} makes streams wait for each other; unset it and try again" if setting else ""
    return missing(f"a stream still waited {LIMIT_S:g} s after the value was written", advice)


def _value(driver: ctypes.CDLL, what: str, stream: torch.cuda.Stream, flag: torch.Tensor, mode: int) -> None:
    name = f"cuStream{what}Value64"
    if hasattr(driver, f"{name}_v2"):  # the first version must be enabled in the driver
        name += "_v2"
    address, value = ctypes.c_uint64(flag.data_ptr()), ctypes.c_uint64(VALUE)
    call(driver, name, ctypes.c_void_p(stream.cuda_stream), address, value, ctypes.c_uint(mode))


def _happens(event: Any, limit_s: float) -> bool:  # noqa: ANN401
    end = monotonic() + limit_s
    while not event.query():
        if monotonic() > end:
            return False
        sleep(0.001)
    return True


if __name__ == "__main__":
    answer()
