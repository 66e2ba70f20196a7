"""The two processes of a bench: started, monitored, and never left behind.

Each rank has a core of its own where there are two (rank 1 is never on the second thread of rank 0's core) and computes
with one thread. Ranks end with this process, however it ends. A rank that fails, dies or falls silent ends the bench
with an error. Ranks keep freed memory (glibc's MALLOC_ variables), as accelerators' allocators do; otherwise a third of
the measured time is the kernel handing out pages. They are forked from a server that has loaded torch once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from benchmarks.runtime.case import CLUSTER
from equilibra.core.environment import environment_with
from equilibra.core.errors import EquilibraError, ExecuteError, InputError, RankLostError

if TYPE_CHECKING:
    from equilibra.execute.group import ExpertGroup

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SILENCE_S = 1800.0
"""seconds after which silent ranks are given up"""
GRACE_S = 5.0
"""seconds for the other rank to report what went wrong"""


@dataclass(frozen=True)
class _Failure:
    """A failing rank's report."""

    kind: str
    text: str
    is_input: bool
    is_echo: bool
    """whether the rank only noticed that the other one was gone"""


def run_on_ranks(
    measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], tell: Callable[[str], None], *,
    timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Call measure(*arguments, group, tell) on two joined ranks; returns the result of rank 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.runtime.rank", "torch.distributed"])
    cores = cores_for_ranks()
    with tempfile.TemporaryDirectory(prefix="equilibra-bench-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            with environment_with({**KEEP_MEMORY, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}):
                forkserver.ensure_running()  # ranks inherit how it allocates memory
                for rank in range(CLUSTER.num_ranks):
                    mine, theirs = context.Pipe(duplex=False)
                    core = None if cores is None else cores[rank]
                    process: BaseProcess = context.Process(
                        target=_rank,
                        args=(rank, core, f"{folder}/store", theirs, measure, arguments, timeout_s),
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    ranks.append((process, mine))
            return _listen(ranks, tell)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def cores_for_ranks() -> list[int] | None:
    """A processor for every rank, on different cores; None if there are too few cores."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    firsts: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        firsts.setdefault(siblings.read_text().strip() if siblings.is_file() else str(cpu), cpu)
    return list(firsts.values())[: CLUSTER.num_ranks] if len(firsts) >= CLUSTER.num_ranks else None


def _listen(ranks: list[tuple[BaseProcess, Connection]], tell: Callable[[str], None]) -> dict[str, Any]:
    """Pass on what rank 0 tells until both ranks are done."""
    results: dict[int, dict[str, Any]] = {}
    failures: dict[int, _Failure] = {}
    end = monotonic() + SILENCE_S
    while len(results) + len(failures) < len(ranks):
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in results and rank not in failures}
        ready = wait(list(pipes), max(0.0, end - monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]  # type: ignore[index]
            said = _heard(pipe, ranks[rank][0])  # type: ignore[arg-type]
            if isinstance(said, str):
                tell(said)
            elif isinstance(said, _Failure):
                failures[rank] = said
            else:
                results[rank] = said
        end = monotonic() + (GRACE_S if failures else SILENCE_S)
    if failures:
        _raise(failures)
    if len(results) < len(ranks):
        raise RankLostError(f"the ranks of the bench have said nothing for {SILENCE_S:.0f} s; they were ended")
    return results[0]


def _heard(pipe: Connection, process: BaseProcess) -> str | _Failure | dict[str, Any]:
    try:
        said: str | _Failure | dict[str, Any] = pipe.recv()
    except EOFError:
        process.join(GRACE_S)
        killed = process.exitcode == -signal.SIGKILL
        hint = ": perhaps memory ran out, use smaller --hidden, --ffn or --layers" if killed else ""
        text = f"ended with exit code {process.exitcode} without a word{hint}"
        return _Failure(kind="RankLostError", text=text, is_input=False, is_echo=False)
    return said


def _raise(failures: dict[int, _Failure]) -> None:
    """Raise the first failure that is not an echo of another."""
    rank = min(failures, key=lambda rank: (failures[rank].is_echo, rank))
    failure = failures[rank]
    if failure.is_input:
        raise InputError(failure.text)
    raise ExecuteError(f"rank {rank} of the bench failed: {failure.kind}: {failure.text}")


def _rank(
    rank: int, core: int | None, store: str, pipe: Connection, measure: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...], timeout_s: float,
) -> None:  # fmt: skip
    """Run one rank."""
    gc.freeze()  # collections between contenders need not look at what the server has loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    Thread(target=_end_with_parent, daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})  # before torch and gloo start threads, which inherit it
    try:
        tell = pipe.send if rank == 0 else _nothing
        pipe.send({**measure(*arguments, _joined(rank, store, timeout_s), tell), **_versions()})
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        known = isinstance(error, EquilibraError)
        pipe.send(_Failure(
            kind=type(error).__name__, text=str(error) if known else repr(error),
            is_input=isinstance(error, InputError), is_echo=isinstance(error, RankLostError),
        ))  # fmt: skip
    pipe.close()
    os._exit(0)  # a lost peer must not keep the process in gloo's destructors


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _nothing(_line: str) -> None:
    """Ignore what rank 1 tells."""


def _joined(rank: int, store: str, timeout_s: float) -> ExpertGroup:
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    from equilibra.execute.group import join_expert_group  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=CLUSTER.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    return join_expert_group(CLUSTER, timeout_s=timeout_s)


def _versions() -> dict[str, str]:
    import torch  # noqa: PLC0415

    return {"torch": torch.__version__}
