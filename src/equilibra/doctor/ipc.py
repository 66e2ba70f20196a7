"""CUDA IPC: another process, which runs this file, opens a tensor of this one, reads it and writes it.

The handle is torch.multiprocessing's reduction of the tensor. On a machine with several GPUs the other process reads
it from its last GPU, so the copy crosses devices.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

from equilibra.doctor.finding import Finding, first_line, missing, ok, warning

__all__ = ["answer", "check_ipc", "expandable_segments"]

NUM_VALUES = 2**18
TIMEOUT_S = 45
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
    done = subprocess.run(
        [sys.executable, "-m", "equilibra.doctor.ipc"],
        input=handle,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"the other process exited with {done.returncode}: {said[-1] if said else 'no message'}")
    read, device = pickle.loads(done.stdout)  # noqa: S301 - from our own child
    torch.cuda.synchronize()
    if read != NUM_VALUES * (NUM_VALUES - 1) // 2:
        raise RuntimeError(f"the other process read a sum of {read}, not {NUM_VALUES * (NUM_VALUES - 1) // 2}")
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


if __name__ == "__main__":
    answer()
