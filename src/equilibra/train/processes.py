"""Start a run: all ranks as processes of this machine or, under torchrun, this process as its rank.

Ranks are forked from a server that has loaded the worker's libraries once. Ctrl-C or SIGTERM stops every rank after its
step; a second signal kills them. Schedulers send SIGTERM to every process of a job: the server ignores it, ranks stop
after their step, and this process decides when they end. When a rank fails or dies, the others get a few seconds to
report and are then killed; one error names the rank and the reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from operator import methodcaller
from pathlib import Path
from random import SystemRandom
from time import monotonic

from equilibra.core.environment import environment_with
from equilibra.core.errors import ExecuteError, InputError
from equilibra.cost.presets import prices_of
from equilibra.rl.observe import Observer
from equilibra.train.config import ClusterConfig
from equilibra.train.rank import SIGNALS, STOP, Failure, Interrupts, Job, failure_of, rank_main, run_rank
from equilibra.train.run_folder import FolderLock

MOST_PROCESSES = 128
"""most ranks on one machine"""
GRACE_S = 6.0
"""seconds that the other ranks get to report the loss of one, or its cause"""
TERMINATE_S = 2.0
"""seconds in which ranks end by themselves after their pipe is closed"""
TICK_S = 0.2
"""seconds between checks for signals"""
PORTS = range(10_000, 32_768)
NODES = "EQUILIBRA_NODES"
"""environment variable for `preload`: nodes of an expert-parallel group"""
STOPPING = "stopping: finishing this step and writing a checkpoint first; a second signal ends the run at once"


@dataclass(kw_only=True, eq=False)
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    ending: Failure | str | None = None
    """its last message"""
    ended_at: float = 0.0
    """when that arrived"""
    speaks: bool = True
    """whether its pipe is open"""
    ended: bool = False

    def listen(self, screen: Observer) -> None:
        """Pass its messages to the screen, and notice its end."""
        code = self.process.exitcode  # before the pipe, which still holds its last message
        try:
            while self.speaks and self.pipe.poll():
                said = self.pipe.recv()
                if isinstance(said, methodcaller):
                    said(screen)
                else:
                    self.ending, self.ended_at = said, monotonic()
        except (EOFError, OSError):
            self.speaks = False
        if code is not None:
            self.ended = True
            if self.ending is None:
                self.ending, self.ended_at = _death(code), monotonic()


def _death(code: int) -> Failure:
    if code >= 0:
        return Failure(text=f"ended with exit code {code} without reporting an error")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by hand, or out of memory)" if -code == signal.SIGKILL else ""
    return Failure(text=f"was killed by {name}{hint}")


def run_processes(job: Job, *, screen: Observer, lock: FolderLock) -> bool:
    """Run all ranks to the end; returns whether they were told to stop earlier."""
    world = job.config.cluster.num_processes
    if world > MOST_PROCESSES:
        raise InputError(
            f"cluster.nodes x ranks_per_node x groups is {world} processes, too many for one machine: use at most "
            f"{MOST_PROCESSES}, or start them on several machines with torchrun"
        )
    ranks: list[_Rank] = []
    with Interrupts() as interrupts:
        try:
            screen.stage("start", step=0)
            for rank in _started(job, world, lock):
                ranks.append(rank)  # noqa: PERF402 - those started must end if the next cannot start
            hung = _listen(ranks, screen, interrupts, job.config.run.timeout_s)
        finally:
            _end(ranks)
    _raise_failure(job, ranks, hung)
    return interrupts.count > 0


def _started(job: Job, world: int, lock: FolderLock) -> Iterator[_Rank]:
    context = multiprocessing.get_context("forkserver")
    worker = job.worker.partition(":")[0]
    beside_it = f"{worker.rpartition('.')[0]}.preload"  # further libraries to load, if there is such a file
    context.set_forkserver_preload(["equilibra.train.rank", worker, beside_it])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) > 0 else max(1, cores // world)
    shared = {
        "OMP_NUM_THREADS": str(threads),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),  # AMX tiles can fail in forks
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # some problems depend on the order of sets
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        NODES: str(job.config.cluster.nodes),
    }
    with environment_with(shared), _holding_interrupts():  # some libraries read it when loaded
        forkserver.ensure_running()
    for number in range(world):
        mine, theirs = context.Pipe()
        environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
        process: BaseProcess = context.Process(
            target=rank_main, args=(number, environment, threads, theirs, job), name=f"rank {number}", daemon=True
        )
        try:
            process.start()
        except (OSError, EOFError) as error:  # the server ended, because a library cannot be loaded
            raise ExecuteError(f"cannot start rank {number}: {error or 'the worker cannot be loaded'}") from error
        theirs.close()
        yield _Rank(number=number, process=process, pipe=mine)
        assert process.pid is not None
        with suppress(OSError):  # a dead one is noticed later
            send_handle(mine, lock.file, process.pid)


def _free_port() -> int:
    """A free port, below the range that systems hand out to connections: none may take it until ranks listen."""
    for port in SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ExecuteError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on this machine")


@contextmanager
def _holding_interrupts() -> Iterator[None]:
    """Block signals in processes started inside the block; this process gets them afterwards."""
    resource_tracker.ensure_running()  # starting it would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(ranks: Sequence[_Rank], screen: Observer, interrupts: Interrupts, timeout_s: float) -> list[_Rank]:
    """Listen until all ranks ended, until GRACE_S after a failure, or until a rank was held by SIGSTOP for the timeout.

    Returns the ranks that still run; only the held ones, if there are any, because the others may just wait for them.
    """
    told, deadline, stopped = False, float("inf"), dict[_Rank, float]()
    while running := [rank for rank in ranks if not rank.ended]:
        if monotonic() > deadline:
            return [rank for rank in running if _is_stopped(rank.process)] or running
        wait([rank.process.sentinel for rank in running] + [rank.pipe for rank in running if rank.speaks], TICK_S)
        for rank in running:
            rank.listen(screen)
        if interrupts.count > 1:
            raise KeyboardInterrupt
        if interrupts.count and not told:
            told = True
            screen.note(STOPPING)
            for rank in running:
                with suppress(OSError):  # a dead one is noticed later
                    rank.pipe.send(STOP)
        now = monotonic()
        stopped = {rank: stopped.get(rank, now) for rank in running if _is_stopped(rank.process)}
        if any(isinstance(rank.ending, Failure) for rank in ranks):
            deadline = min(deadline, now + GRACE_S)
        elif any(rank.ended for rank in ranks):  # one is done, another is not
            deadline = min(deadline, now + timeout_s + GRACE_S)
        elif stopped:
            deadline = min(stopped.values()) + timeout_s + GRACE_S
        else:
            deadline = float("inf")  # a stopped rank went on
    return []


def _is_stopped(process: BaseProcess) -> bool:
    """Whether SIGSTOP holds the process; False where there is no /proc."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _end(ranks: Sequence[_Rank]) -> None:
    running = [rank for rank in ranks if rank.process.exitcode is None]
    for rank in ranks:
        rank.pipe.close()  # a rank without a pipe ends itself
    _join(running, TERMINATE_S)
    for rank in running:
        rank.process.kill()
    _join(running, TERMINATE_S)


def _join(ranks: Sequence[_Rank], seconds: float) -> None:
    end = monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, end - monotonic()))


def _raise_failure(job: Job, ranks: Sequence[_Rank], hung: Sequence[_Rank]) -> None:
    """Raise the first failure that is not an echo of another; else name the ranks that hung, else any failure."""
    in_order = sorted(ranks, key=lambda rank: rank.ended_at)
    failed = [(rank, rank.ending) for rank in in_order if isinstance(rank.ending, Failure)]
    causes = [(rank, failure) for rank, failure in failed if not failure.is_echo]
    world, folder = len(ranks), job.folder
    resume = f"continue with: equilibra train --resume {folder.path}"
    if causes and causes[0][1].is_input:
        raise InputError(causes[0][1].text + (f"; {resume}" if folder.has_checkpoint else ""))
    if hung and not causes:
        numbers = ", ".join(str(rank.number) for rank in hung)
        what = f"rank {numbers} of {world} did not answer and was ended"
        what += f" (rank {failed[0][0].number}: {failed[0][1].text})" if failed else ""
    elif failed:
        rank, failure = (causes or failed)[0]
        said = failure.text if failure.text.startswith(("was ", "ended ")) else f"failed: {failure.text}"
        what = f"rank {rank.number} of {world} {said}"
    else:
        return
    raise ExecuteError(f"{what}; {resume} (output of the ranks: {folder.output})")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank of this process under torchrun."""

    rank: int
    restarts: int = 0
    """times that torchrun restarted all processes"""


def place_under_torchrun(cluster: ClusterConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Read this process's place from RANK and WORLD_SIZE, which must fit the cluster; None without torchrun."""
    if "RANK" not in environment:
        return None
    try:
        rank, world = int(environment["RANK"]), int(environment.get("WORLD_SIZE", ""))
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError:
        raise InputError(
            "RANK is set, but RANK and WORLD_SIZE are not both numbers: use torchrun, or unset RANK"
        ) from None
    size = cluster.nodes * cluster.ranks_per_node
    if world != cluster.num_processes:
        groups = f"set cluster.groups={world // size}" if world % size == 0 else "change cluster.*"
        raise InputError(
            f"torchrun started {world} processes, but cluster.nodes={cluster.nodes} x cluster.ranks_per_node="
            f"{cluster.ranks_per_node} x cluster.groups={cluster.groups} is {cluster.num_processes}: "
            f"{groups}, or start {cluster.num_processes} processes"
        )
    return Place(rank=rank, restarts=restarts)


def launch(job: Job, *, screen: Observer, place: Place | None, lock: FolderLock | None) -> bool:
    """Run to the last step; returns whether the run was told to stop earlier."""
    prices_of(job.config.balance.hardware)  # a name that does not exist ends the run now, not after the warm-up
    if place is None:
        assert lock is not None
        return run_processes(job, screen=screen, lock=lock)
    with Interrupts(lambda count: os._exit(130) if count > 1 else None) as interrupts:
        told = False

        def stop() -> bool:
            nonlocal told
            if interrupts.count and not told:
                told = True
                screen.note("stopping: the step is finished, writing a checkpoint")
            return interrupts.count > 0

        try:
            run_rank(job, place.rank, screen=screen, stop=stop)
        except (OSError, MemoryError) as error:
            failure = failure_of(error)
            if failure.is_input:
                raise InputError(failure.text) from error
            raise
    return interrupts.count > 0
