"""Worker processes of a rollout engine: started together, connected by pipes, ended with the process that started them.

Ranks of a training run are daemonic and have threads, so they may neither fork nor use multiprocessing. A server
process, started with `subprocess`, imports the libraries once and forks all workers. It reports workers that have
ended, and kills the rest once its own pipe closes. If the server is killed, the kernel kills the workers.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple

from equilibra.core.errors import ExecuteError

BOOT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from equilibra.rollout.processes import serve
serve(pipe)
"""
HELD = (signal.SIGINT, signal.SIGTERM)
"""signals to the whole job, blocked in workers: the process that started them decides"""
LOOK_S = 0.1
"""interval at which the server checks for workers that have ended"""
DEATH_S = 1.0
"""time for the server to report how a worker ended"""
FLUSH_S = 5.0
"""time for a worker's last messages"""
PR_SET_PDEATHSIG = 1


class Job(NamedTuple):
    """What a worker does."""

    name: str
    """for messages, such as: expert process 0"""
    function: Callable[..., None]
    """called in the worker with its pipe and `arguments`"""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A worker's last message if it raises."""

    kind: str
    """class of the error"""
    text: str


class Outbox:
    """Sends messages over a pipe from a thread, so that a process that does not read blocks nobody."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._queue = pipe, SimpleQueue[Any]()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, what: Any) -> None:  # noqa: ANN401
        self._queue.put((what,))

    def _run(self) -> None:
        with suppress(OSError, TypeError):  # TypeError: the pipe was closed here
            while (item := self._queue.get()) is not None:
                self._pipe.send(*item)

    def close(self, wait_s: float = FLUSH_S) -> None:
        """Send what is queued; then the pipe may be used directly."""
        self._queue.put(None)
        self._thread.join(wait_s)


@dataclass(eq=False)
class Worker:
    """A running worker, seen from the process that started it."""

    name: str
    pipe: Connection
    pid: int = 0
    inbox: deque[Any] = field(default_factory=deque)
    """messages received and not read yet"""

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.pipe)


class Workers:
    """All workers of an engine."""

    def __init__(self, jobs: Sequence[Job], *, load: Sequence[str], start_s: float) -> None:
        """load: modules to import before forking. start_s: time limit for importing and forking."""
        self._server: subprocess.Popen[bytes] | None = None
        pairs = [Pipe() for _ in jobs]
        self.every = [Worker(job.name, mine) for job, (mine, _) in zip(jobs, pairs, strict=True)]
        self._control, control = Pipe()
        theirs = [control, *(one for _, one in pairs)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # the processes inherit it
        try:
            self._server = subprocess.Popen(  # noqa: S603 - this Python runs BOOT
                [sys.executable, "-c", BOOT, str(control.fileno())], pass_fds=[one.fileno() for one in theirs],
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self._control.send(sys.path)
            self._control.send((list(load), [one.fileno() for one in theirs[1:]], list(jobs)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for one in theirs:
                one.close()
        self._await_start(start_s)

    def _await_start(self, start_s: float) -> None:
        said: Any = None
        with suppress(EOFError, OSError):
            said = self._control.recv() if self._control.poll(start_s) else None
        if not isinstance(said, list):
            self.close()
            why = f": {said.kind}: {said.text}" if isinstance(said, Failed) else ""
            raise ExecuteError(f"the processes of the rollout engine did not start within {start_s:g} s{why}")
        for worker, pid in zip(self.every, said, strict=True):
            worker.pid = pid

    def ending_of(self, worker: Worker) -> str:
        """How a worker whose pipe is closed has ended."""
        end = monotonic() + DEATH_S
        with suppress(EOFError, OSError):
            while self._control.poll(max(0.0, end - monotonic())):
                pid, status = self._control.recv()
                if pid == worker.pid:
                    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        return "is gone"

    def close(self) -> None:
        """End all workers; may be called again."""
        if self._server is not None:
            self._server.kill()  # the kernel then kills its children
            self._server.wait()
        for worker in self.every:
            worker.outbox.close(0.0)
        for one in (self._control, *(worker.pipe for worker in self.every)):
            one.close()

    def __del__(self) -> None:
        if hasattr(self, "_control"):
            self.close()


def serve(pipe: Connection) -> None:
    """Import modules, fork the workers, and report workers that end until the pipe closes."""
    try:
        modules, descriptors, jobs = pipe.recv()
        for module in modules:
            importlib.import_module(module)
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        pipe.send(Failed(kind=type(error).__name__, text=str(error)[:600]))
        return
    pids = [_forked(pipe, descriptors, number, job) for number, job in enumerate(jobs)]
    for descriptor in descriptors:
        os.close(descriptor)
    pipe.send(pids)
    while not wait([pipe], LOOK_S):
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pipe.send((found[0], os.waitstatus_to_exitcode(found[1])))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _forked(pipe: Connection, descriptors: Sequence[int], number: int, job: Job) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    pipe.close()
    for other, descriptor in enumerate(descriptors):
        if other != number:
            os.close(descriptor)
    own = Connection(descriptors[number])
    code = 1
    try:
        job.function(own, *job.arguments)
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # the process that started us is gone or done
    except BaseException as error:  # noqa: BLE001 - reported to the process that started us
        traceback.print_exc()
        with suppress(OSError, ValueError):
            own.send(Failed(kind=type(error).__name__, text=str(error)[:2000]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
