"""Checks of host memory: locked memory, pinning, /dev/shm, and registering shared memory with CUDA.

The host path keeps one segment per node in /dev/shm. With n published instances, R ranks per node, S spare slots and P
parameters per expert it holds, each part in whole pages,

    8 n  +  n P weight bytes  +  2 R S P gradient bytes

n is the number of experts a step's plan copies: at most every expert of every layer whose home is on the node.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from equilibra.core.model import MoEModel
from equilibra.doctor.finding import Ask, Finding, first_line, missing, ok, warning

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the host path keeps its segment
INFINIBAND = Path("/dev/infiniband")
PAGE, MIB, GIB = 4096, 2**20, 2**30
PINNED_BYTES, REGISTERED_BYTES = 64 * MIB, 4 * MIB
RANKS_WITHOUT_GPUS = 2
TOO_SMALL = "make it larger (docker: --shm-size, kubernetes: an emptyDir of medium Memory), or use the collective path"


def check_locked() -> Finding:
    """RLIMIT_MEMLOCK, which limits InfiniBand but not CUDA."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited", bytes=None)
    text = f"{limit / MIB:g} MiB (RLIMIT_MEMLOCK)"
    if not INFINIBAND.exists():
        return ok(f"{text}; only InfiniBand needs more, and this machine has none", bytes=limit)
    advice = "NCCL over InfiniBand needs more: ulimit -l unlimited (docker: --ulimit memlock=-1)"
    return warning(text, advice, bytes=limit)


def check_pinning() -> Finding:
    """Pin 64 MiB and copy it to the device and back."""
    import torch

    try:
        host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        advice = "raise the container's memory limit; copies from host memory will not overlap with compute"
        return missing(first_line(error), advice)
    host.fill_(7)
    back = torch.empty_like(host).copy_(host.to("cuda", non_blocking=True))
    if not host.is_pinned() or not bool((back == 7).all()):
        return missing("pinned 64 MiB, but they came back changed")
    return ok(f"pinned {PINNED_BYTES // MIB} MiB, to the GPU and back")


def check_shared_memory(ask: Ask) -> Finding:
    """Free space in /dev/shm, compared with what the host path needs for the model."""
    with _shared_file(PAGE):
        pass  # raises if /dev/shm is not writable
    about = os.statvfs(SHARED_MEMORY)
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    values: dict[str, Any] = {"total_bytes": total, "free_bytes": free}
    if ask.model is None:
        if free < 64 * MIB:
            return warning(text, TOO_SMALL, **values)
        return ok(f"{text} (--model tells whether it is enough)", **values)
    from equilibra.cost.presets import load_model

    model, ranks = load_model(ask.model), ask.ranks_per_node or _ranks_here()
    fewest, one, most = needed_bytes(model, num_ranks=ranks, spare_slots=ask.spare_slots)
    values |= {"model": model.name, "ranks_per_node": ranks, "spare_slots": ask.spare_slots,
               "gradients_bytes": fewest, "one_micro_batch_bytes": one, "every_expert_bytes": most}  # fmt: skip
    text += (
        f"; {model.name}, {ranks} ranks, {ask.spare_slots} spare slots: {one / GIB:.1f} GiB (one micro-batch) "
        f"to {most / GIB:.1f} GiB (every expert)"
    )
    if free >= most:
        return ok(text, **values)
    return (missing if free < fewest else warning)(text, TOO_SMALL, **values)


def check_registering() -> Finding:
    """Register shared memory with CUDA, copy it to the device, and unregister it."""
    with _shared_file(REGISTERED_BYTES) as descriptor, mmap.mmap(descriptor, REGISTERED_BYTES) as memory:
        answer, came = _registered(memory)
    if answer != 0:
        return missing(f"cudaHostRegister of shared memory returned {answer}", "use the collective path")
    if not came:
        return missing("registered, but the bytes reached the GPU changed")
    return ok(f"registered {REGISTERED_BYTES // MIB} MiB of shared memory with CUDA and copied it to the GPU")


def segment_bytes(model: MoEModel, *, num_ranks: int, spare_slots: int, num_instances: int) -> int:
    """Bytes of the host path's segment."""
    values = model.expert_parameters
    parts = (8 * num_instances, num_instances * values * model.weight_bytes,
             2 * num_ranks * spare_slots * values * model.gradient_bytes)  # fmt: skip
    return max(sum(-(-part // PAGE) * PAGE for part in parts), PAGE)


def needed_bytes(model: MoEModel, *, num_ranks: int, spare_slots: int) -> tuple[int, int, int]:
    """Segment bytes for no instance, for one micro-batch that fills every slot, and for all experts of all layers."""
    of_one = model.num_layers * min(model.num_experts, num_ranks * spare_slots)
    sizes = (0, of_one, model.num_layers * model.num_experts)
    fewest, one, most = (
        segment_bytes(model, num_ranks=num_ranks, spare_slots=spare_slots, num_instances=size) for size in sizes
    )
    return fewest, one, most


def _ranks_here() -> int:
    try:
        import torch
    except ImportError:
        return RANKS_WITHOUT_GPUS
    return torch.cuda.device_count() or RANKS_WITHOUT_GPUS


def _registered(memory: mmap.mmap) -> tuple[int, bool]:
    """The return code of cudaHostRegister, and whether the bytes reached the device."""
    import torch

    host = torch.frombuffer(memory, dtype=torch.uint8).fill_(5)
    cudart = cast("Any", torch.cuda).cudart()
    answer = int(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if answer != 0:
        return answer, False
    try:
        return answer, bool((host.to("cuda", non_blocking=True) == 5).all())
    finally:
        cudart.cudaHostUnregister(host.data_ptr())


@contextmanager
def _shared_file(num_bytes: int) -> Iterator[int]:
    """An unlinked file with reserved space in /dev/shm, as the host path makes them."""
    descriptor, name = tempfile.mkstemp(prefix="equilibra-doctor-", dir=SHARED_MEMORY)
    try:
        Path(name).unlink()
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)
