"""Run a function on several processes, as torchrun would, and get what each returned.

Processes are forked from a server that has torch loaded, so a group of eight starts in a second. With the backend
"nccl" they share one GPU: each claims to be another host, as NCCL wants one process per GPU and host, and has its share
of the multiprocessors where MPS runs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["Outcome", "run_ranks", "start_ranks", "start_server"]

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["torch.distributed", "equilibra.execute.moe", "tests.distributed.preload"]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    value: Any = None
    error: str | None = None
    """type and message of the exception it raised"""
    died: int | None = None
    """exit code, if it ended without a word"""
    seconds: float = 0.0


def _main(
    rank: int, world: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...],
    backend: str, environment: dict[str, str],
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    if backend == "nccl":
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // world)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # AMX tiles are not allowed in every forked process
    faulthandler.enable()
    torch.set_num_threads(1)
    start = monotonic()
    try:
        if world > 1:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        outcome = Outcome(value=function(*args), seconds=monotonic() - start)
    except BaseException as error:  # noqa: BLE001
        if os.environ.get("EQUILIBRA_TEST_TRACE"):
            traceback.print_exc()
        outcome = Outcome(error=f"{type(error).__name__}: {error}", seconds=monotonic() - start)
    pipe.send(outcome)
    pipe.close()
    os._exit(0)  # a lost peer must not keep the process in gloo's destructors


def start_server() -> None:
    """Start this process's fork server, if there is none, with what all tests need: whoever starts it first decides."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def start_ranks(
    world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo",
    environment: dict[str, str] | None = None,
) -> tuple[list[multiprocessing.process.BaseProcess], list[Connection], Path]:  # fmt: skip
    """Start the processes; the caller looks after them."""
    if CONTEXT.get_start_method() == "forkserver":
        start_server()
    store = Path(tempfile.mkdtemp(prefix="equilibra-test-")) / "store"
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        told = (rank, world, str(store), theirs, function, args, backend, environment or {})
        process = CONTEXT.Process(target=_main, args=told, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes, store


def collect(
    processes: list[multiprocessing.process.BaseProcess], pipes: list[Connection], timeout_s: float
) -> list[Outcome]:
    """What every rank said; one that says nothing within the time is killed and the test fails."""
    outcomes: dict[int, Outcome] = {}
    end = monotonic() + timeout_s
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), max(0.0, end - monotonic()))
        if not ready:
            for process in processes:
                process.kill()
            raise AssertionError(f"ranks {sorted(open_pipes)} hung for {timeout_s} s; others: {outcomes}")
        for rank, pipe in list(open_pipes.items()):
            if pipe in ready:
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(10)
                    outcomes[rank] = Outcome(died=processes[rank].exitcode)
                del open_pipes[rank]
    for process in processes:
        process.join(10)
    return [outcomes[rank] for rank in range(len(processes))]


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, backend: str = "gloo",
    environment: dict[str, str] | None = None,
) -> list[Any]:  # fmt: skip
    """What the function returned on every rank; a rank that failed fails the test."""
    processes, pipes, _ = start_ranks(world, function, *args, backend=backend, environment=environment)
    outcomes = collect(processes, pipes, timeout_s)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error or outcome.died is not None}
    if failed:
        raise AssertionError(
            "\n".join(f"rank {rank}: {o.error or f'died with {o.died}'}" for rank, o in failed.items())
        )
    return [outcome.value for outcome in outcomes]
