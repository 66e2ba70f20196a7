"""The life of one rank: find the worker, give it its observer, and say how it ended.

World rank 0 writes metrics, log and TensorBoard files; the screen is drawn by whoever started the ranks, who is told
everything over a pipe. A rank ends with the process that started it, however that ends.
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
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from threading import Event, Thread
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

from equilibra.core.errors import InputError, RankLostError
from equilibra.integrations.tensorboard import TensorBoard
from equilibra.rl.observe import Silent
from equilibra.train.config import TrainConfig
from equilibra.train.metrics_file import MetricsFile
from equilibra.train.plain_log import LogFile, PlainLog, Screen, Several
from equilibra.train.run_folder import RunFolder

__all__ = [
    "REPEAT_S", "SIGNALS", "STOP", "Done", "Failure", "Interrupts", "Job", "Told", "failure_of", "rank_main",
    "run_rank",
]  # fmt: skip

# Ctrl-C and SIGTERM as a count: the first one asks a run to end after its step, the second one at once.
#
# A scheduler's SIGTERM may come twice: to every process, and again from the parent that passes it on (torchrun,
# `timeout`). Those that follow within REPEAT_S are the same one.


SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 2.0
"""in which further SIGTERMs count as the one before"""


class Interrupts:
    """Counts the signals of a `with` block, in the main thread."""

    def __init__(self, at_each: Callable[[int], None] = lambda _count: None) -> None:
        """`at_each` is called with the count, in the signal handler: it must be short."""
        self.count = 0
        self._terminated_at = float("-inf")
        self._at_each = at_each
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._terminated_at = self._terminated_at, monotonic()
            if self._terminated_at - before < REPEAT_S:
                return
        self.count += 1
        self._at_each(self.count)


STOP = "stop"
"""what a rank is told to end after this step"""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
"""what the operating system says when a folder cannot be written: not a defect of ours"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks are told."""

    config: TrainConfig
    """of the run"""
    folder: RunFolder
    """of the run"""
    resume: bool
    """whether to go on from the last checkpoint"""
    worker: str
    """module:function that trains; imported by the ranks only, for it is large"""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Something for the screen: one of its methods, and what to call it with."""

    method: str
    """stage, step, evaluated or note"""
    arguments: tuple[Any, ...]
    """by position"""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """by name"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The worker returned."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank ended before its time."""

    text: str
    """what a user reads"""
    is_input: bool = False
    """whether what the user handed in is at fault"""
    is_echo: bool = False
    """whether the rank only noticed that another one was gone"""


def failure_of(error: BaseException) -> Failure:
    """What to say of an error."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return Failure(text=f"cannot write {error.filename or 'the run'}: {error.strerror}", is_input=True)
    if isinstance(error, MemoryError):
        return Failure(text="this needs more memory than there is; use a smaller model or batch", is_input=True)
    lost = isinstance(error, RankLostError) or type(error).__name__.startswith("Dist") or "/gloo/" in str(error)
    text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return Failure(text=text[:2000], is_input=isinstance(error, InputError), is_echo=lost)


def run_rank(job: Job, rank: int, *, screen: Screen, stop: Callable[[], bool]) -> None:
    """Train as this world rank; the screen matters on rank 0."""
    module, _, function = job.worker.partition(":")
    worker: Callable[..., None] = getattr(import_module(module), function)
    if rank != 0:
        worker(
            job.config, job.folder.path, resume=job.resume, observer=Silent(), stop=stop, say=_nothing, cut=_nothing
        )  # fmt: skip
        return
    metrics, log = MetricsFile(job.folder.metrics), PlainLog(LogFile(job.folder.log), steps=job.config.run.steps)
    files = Several([metrics, log, TensorBoard(job.folder.tensorboard)])

    def say(text: str) -> None:
        log.note(text)
        screen.note(text)

    try:
        worker(
            job.config, job.folder.path, resume=job.resume, observer=Several([files, screen]), stop=stop, say=say,
            cut=metrics.cut,
        )  # fmt: skip
    finally:
        files.close()


def _nothing(_value: object) -> None:
    """What other ranks say and cut."""


class _Teller:
    """A screen at the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        self._pipe.send(Told(method="stage", arguments=(name,), keywords={"step": step, "done": done, "total": total}))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pipe.send(Told(method="step", arguments=(step, _plain(metrics))))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pipe.send(Told(method="evaluated", arguments=(step, _plain(metrics))))

    def note(self, text: str) -> None:
        self._pipe.send(Told(method="note", arguments=(text,)))

    def close(self) -> None:
        """Nothing: whoever draws closes."""


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Numbers that need no library to be read."""
    return {name: float(value) for name, value in metrics.items()}


def rank_main(rank: int, environment: Mapping[str, str], threads: int, pipe: Connection, job: Job) -> None:
    """What a process that was started for a rank does."""
    stop = Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # for good it ends us through the pipe
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ending: Done | Failure = Done()
    try:
        recv_handle(pipe)  # the run folder's lock: held as long as this process lives
        Thread(target=_listen, args=(pipe, stop), daemon=True).start()
        os.environ.update(environment)
        _redirect(job.folder, rank)
        _use_threads(job, threads)
        run_rank(job, rank, screen=_Teller(pipe), stop=stop.is_set)
    except BaseException as error:  # noqa: BLE001 - whatever it was, whoever started us must hear of it
        ending = failure_of(error)
        if not isinstance(error, InputError):
            with suppress(OSError, ValueError):  # a full disk holds no traceback, and no reason to say nothing
                traceback.print_exc()
    with suppress(OSError, ValueError):
        pipe.send(ending)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0 if isinstance(ending, Done) else 1)  # a lost peer must not keep the process in gloo's destructors


def _listen(pipe: Connection, stop: Event) -> None:
    """Until the process that started us is gone: then so are we."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(EOFError, OSError):
        while parent.sentinel not in wait([parent.sentinel, pipe]):
            if pipe.recv() == STOP:
                stop.set()
    os._exit(1)


def _redirect(folder: RunFolder, rank: int) -> None:
    """What libraries print goes to a file: a screen is drawn where it would go."""
    folder.output.mkdir(exist_ok=True)
    file = os.open(folder.output / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()


def _use_threads(job: Job, threads: int) -> None:
    """Share the cores."""
    import_module(job.worker.partition(":")[0])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
