"""The worker process: reads one job per line and answers with one line of findings, as JSON.

Drivers hang and libraries crash, so everything that touches a device runs here while `node` waits with a time limit.
Answers go to the original stdout; what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from equilibra.doctor import devices, ipc, memory, software
from equilibra.doctor.finding import RUNTIME_PATHS, Ask, Finding, Measured, State, guarded, has_gpu, not_tested, ok
from equilibra.doctor.measure import GPU_MEASUREMENTS, HOST_MEASUREMENTS

__all__ = ["CHECKS", "GPU", "HOST", "Check", "answer", "main"]

GPU, HOST = "gpu/", "host/"
"""prefixes of measurement names"""
TRIED = State.MISSING
"""state after an error in a check that runs something: it does not work"""
READ = State.NOT_TESTED
"""state after an error in a check that only looks something up: unknown"""


def check_paths() -> Finding:
    """The transfer paths of this version of the runtime."""
    from equilibra.execute.copies.transfer import Path

    paths = [str(path) for path in Path]
    return ok(f"{', '.join(paths)} in this version", paths=paths)


class Check(NamedTuple):
    """A check, and the state of its finding if it raises."""

    on_error: State
    run: Callable[..., Finding | Sequence[Finding]]
    asks: bool = False
    """whether it takes the user's `Ask`"""
    on_gpu: bool = False
    """whether it is run only where there is a GPU"""


CHECKS = {
    "python": Check(READ, software.check_python),
    "torch": Check(TRIED, software.check_torch),
    "cuda": Check(READ, software.check_cuda),
    "triton": Check(READ, software.check_triton),
    "gpu": Check(READ, devices.check_gpus),
    "sharing a gpu": Check(READ, devices.check_sharing, on_gpu=True),
    "peer access": Check(READ, devices.check_peers, on_gpu=True),
    "nvlink": Check(READ, devices.check_nvlink, on_gpu=True),
    "nccl": Check(TRIED, software.check_nccl),
    "gloo": Check(TRIED, software.check_gloo),
    "locked memory": Check(READ, memory.check_locked),
    "pinned memory": Check(TRIED, memory.check_pinning, on_gpu=True),
    "shared memory": Check(TRIED, memory.check_shared_memory, asks=True),
    "registering": Check(TRIED, memory.check_registering, on_gpu=True),
    "cuda ipc": Check(TRIED, ipc.check_ipc, on_gpu=True),
    "stream values": Check(TRIED, devices.check_stream_values, on_gpu=True),
    RUNTIME_PATHS: Check(READ, check_paths),
}
"""by name, in display order"""


def answer(job: str, ask: Ask) -> dict[str, Any]:
    """Run one job; returns its findings and measurements, ready for JSON."""
    if job.startswith((GPU, HOST)):
        return _measure(job)
    check = CHECKS[job]

    def run() -> Finding | Sequence[Finding]:
        if check.on_gpu and not has_gpu():
            return not_tested("no GPU here")
        return check.run(ask) if check.asks else check.run()

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
    """Answer jobs until stdin closes."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(answer(question["job"], Ask(**question["ask"]))), file=out, flush=True)
    os._exit(0)  # a stream that still waits must not keep the process alive


if __name__ == "__main__":
    main()
