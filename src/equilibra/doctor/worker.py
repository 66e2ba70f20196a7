"""The process that tries things: a line with a job in, a line with what came out of it back, as JSON.

Drivers hang and libraries crash; so everything that touches a device happens here, and `node` only waits, with a limit.
Answers go to what was stdout when the process started: whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from equilibra.doctor import devices, ipc, memory, software
from equilibra.doctor.finding import RUNTIME_PATHS, Ask, Finding, Measured, State, guarded
from equilibra.doctor.measure import GPU_MEASUREMENTS, HOST_MEASUREMENTS

__all__ = ["CHECKS", "GPU", "HOST", "Check", "answer", "main"]

GPU, HOST = "gpu/", "host/"
"""how names of measurements begin"""
TRIED = State.MISSING
"""an error while something is tried says that it does not work"""
READ = State.NOT_TESTED
"""an error while something is looked up says nothing"""


def check_paths() -> Finding:
    """The paths that this version of the runtime has."""
    from equilibra.execute.copies.transfer import Path

    paths = [str(path) for path in Path]
    text = f"{', '.join(paths)} in this version"
    return Finding(name=RUNTIME_PATHS, state=State.OK, text=text, values={"paths": paths})


class Check(NamedTuple):
    """One check, and what an error inside it means."""

    on_error: State
    run: Callable[..., Finding | Sequence[Finding]]
    asks: bool = False
    """whether it depends on what the user wants to run"""


CHECKS = {
    "python": Check(READ, software.check_python),
    "torch": Check(TRIED, software.check_torch),
    "cuda": Check(READ, software.check_cuda),
    "triton": Check(READ, software.check_triton),
    "gpu": Check(READ, devices.check_gpus),
    "sharing a gpu": Check(READ, devices.check_sharing),
    "peer access": Check(READ, devices.check_peers),
    "nvlink": Check(READ, devices.check_nvlink),
    "nccl": Check(TRIED, software.check_nccl),
    "gloo": Check(TRIED, software.check_gloo),
    "locked memory": Check(READ, memory.check_locked),
    "pinned memory": Check(TRIED, memory.check_pinning),
    "shared memory": Check(TRIED, memory.check_shared_memory, asks=True),
    "registering": Check(TRIED, memory.check_registering),
    "cuda ipc": Check(TRIED, ipc.check_ipc),
    "stream values": Check(TRIED, devices.check_stream_values),
    RUNTIME_PATHS: Check(READ, check_paths),
}
"""by name, in the order they are shown"""


def answer(job: str, ask: Ask) -> dict[str, Any]:
    """Do one job; findings or measurements, ready for JSON."""
    if job.startswith((GPU, HOST)):
        return _measure(job)
    check = CHECKS[job]
    run = partial(check.run, *([ask] if check.asks else []))
    return {"findings": [asdict(finding) for finding in guarded(job, run, on_error=check.on_error)]}


def _measure(job: str) -> dict[str, Any]:
    kind, _, name = job.partition("/")
    measured: list[Measured] = []

    def run() -> list[Finding]:
        found = {"gpu": GPU_MEASUREMENTS, "host": HOST_MEASUREMENTS}[kind][name]()
        measured.extend([found] if isinstance(found, Measured) else found)
        return []

    failed = guarded(f"measuring {name}", run, on_error=State.NOT_TESTED)
    return {"findings": [asdict(one) for one in failed], "measured": [asdict(one) for one in measured]}


def main() -> None:
    """Answer until nobody asks any more."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(answer(question["job"], Ask(**question["ask"]))), file=out, flush=True)
    os._exit(0)  # a stream that still waits for a value must not keep the process


if __name__ == "__main__":
    main()
