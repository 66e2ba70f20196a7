"""One rank's process: run the worker with its observer, and report how it ended.

World rank 0 writes metrics, log and TensorBoard files. The process that started the ranks draws the screen and hears
everything over a pipe; when it ends, so do the ranks.
"""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from threading import Event, Thread
from time import monotonic
from types import FrameType
from typing import Any, Self

from equilibra.core.errors import InputError, RankLostError
from equilibra.integrations.tensorboard import TensorBoard
from equilibra.rl.observe import Observer, Relay, several
from equilibra.train.config import TrainConfig
from equilibra.train.metrics import MetricsFile, PlainLog, append_line
from equilibra.train.run_folder import RunFolder

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 2.0
"""seconds in which further SIGTERMs count as the same one"""
STOP, DONE = "stop", "done"
"""messages: to a rank, to stop after its step; from a rank, that its worker returned"""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
"""errors of a folder that cannot be written, which only the user can mend"""


class Interrupts:
    """Counts Ctrl-C and SIGTERM in a `with` block: the first stops a run after its step, the second at once.

    SIGTERM may come twice, from the scheduler and from a parent that forwards it (torchrun, `timeout`).
    """

    def __init__(self, at_each: Callable[[int], None] = lambda _count: None) -> None:
        """at_each: called with the count in the signal handler; must be short."""
        self.count = 0
        self._terminated_at = float("-inf")
        self._at_each = at_each
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._terminated_at = self._terminated_at, monotonic()
            if self._terminated_at - before < REPEAT_S:
                return
        self.count += 1
        self._at_each(self.count)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks get."""

    config: TrainConfig
    folder: RunFolder
    resume: bool
    """whether to continue from the last checkpoint"""
    worker: str
    """module:function that trains; imported only by the ranks"""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank failed."""

    text: str
    """message for the user"""
    is_input: bool = False
    """whether the user's input is at fault"""
    is_echo: bool = False
    """whether the rank only noticed that another was lost"""


def failure_of(error: BaseException) -> Failure:
    """The failure to report for an error."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return Failure(text=f"cannot write {error.filename or 'the run'}: {error.strerror}", is_input=True)
    if isinstance(error, MemoryError):
        return Failure(text="this needs more memory than there is; use a smaller model or batch", is_input=True)
    lost = isinstance(error, RankLostError) or type(error).__name__.startswith("Dist") or "/gloo/" in str(error)
    text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return Failure(text=text[:2000], is_input=isinstance(error, InputError), is_echo=lost)


def run_rank(job: Job, rank: int, *, screen: Observer, stop: Callable[[], bool]) -> None:
    """Train as this world rank; only rank 0 reports, to files and to the screen."""
    module, _, function = job.worker.partition(":")
    worker: Callable[..., None] = getattr(import_module(module), function)
    metrics, files, observer = MetricsFile(job.folder.metrics), Observer(), Observer()
    if rank == 0:
        log = PlainLog(partial(append_line, job.folder.log), steps=job.config.run.steps)
        files = several(metrics, log, TensorBoard(job.folder.tensorboard))
        observer = several(files, screen)
    try:
        cut = metrics.cut if rank == 0 else lambda _step: None
        worker(job.config, job.folder.path, resume=job.resume, observer=observer, stop=stop, cut=cut)
    finally:
        files.close()


def rank_main(rank: int, environment: Mapping[str, str], threads: int, pipe: Connection, job: Job) -> None:
    """Entry point of a rank's process."""
    stop = Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # the parent ends us through the pipe
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ending: Failure | str = DONE
    try:
        recv_handle(pipe)  # the run folder's lock, held while this process lives
        Thread(target=_listen, args=(pipe, stop), daemon=True).start()
        os.environ.update(environment)
        _redirect(job.folder, rank)
        import_module(job.worker.partition(":")[0])
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        run_rank(job, rank, screen=Relay(pipe.send), stop=stop.is_set)
    except BaseException as error:  # noqa: BLE001 - the parent must hear of every error
        ending = failure_of(error)
        if not isinstance(error, InputError):
            with suppress(OSError, ValueError):  # the disk may be full
                traceback.print_exc()
    with suppress(OSError, ValueError):
        pipe.send(ending)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0 if ending == DONE else 1)  # a lost peer must not keep the process in gloo's destructors


def _listen(pipe: Connection, stop: Event) -> None:
    """Listen until the parent ends, then exit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(EOFError, OSError):
        while parent.sentinel not in wait([parent.sentinel, pipe]):
            if pipe.recv() == STOP:
                stop.set()
    os._exit(1)


def _redirect(folder: RunFolder, rank: int) -> None:
    """Send stdout and stderr to a file, because the screen is drawn on the terminal."""
    folder.output.mkdir(exist_ok=True)
    file = os.open(folder.output / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()
