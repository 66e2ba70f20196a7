"""Threads on every rank that turn a lost rank into an error instead of a hang.

On GPUs a collective's `wait()` blocks a stream, not the host; a stream waits forever for a dead rank, and so does the
host once it synchronises. So:

    expect   the group registers everything a device waits for: collectives, returning gradients
    ask      one thread asks the device what is done. Asking may block: CUDA answers nobody while it loads a kernel, and
             loading may wait for all that runs, including a collective without its peer
    look     every TICK_S another thread checks whether the oldest unfinished operation is older than timeout_s, whether
             a communicator has failed, and whether another rank has told the store why it failed
    lose     it then tells the store (the first cause stays), raises the node's device signals and aborts the
             communicators, so that everything that waits on a device, or for one, goes on
    check    the next call of the group raises RankLostError with the cause

torch's own watchdog would end the process without a Python error; groups made here disable it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from equilibra.core.environment import environment_with
from equilibra.core.errors import RankLostError

TICK_S = 0.2
"""interval of the thread's checks"""
ANSWER_S = 2.0
"""time in which living ranks answer a roll call"""
STORE_S = 5.0
"""timeout after which the store counts as gone"""
CAUSE = "cause"
_T = TypeVar("_T")
ADVICE = "look for the first error of the other ranks, then restart from the last checkpoint"


@dataclass(kw_only=True, eq=False)
class _Expected:
    what: str
    done: Callable[[], bool]
    since: float


@dataclass(kw_only=True, eq=False)
class _Queue:
    """Operations that finish in this order."""

    waiting: deque[_Expected] = field(default_factory=deque)
    moved_on: float = 0.0
    """when one last finished"""


class Watch:
    """The watch of one rank. Without a store it cannot hear of other ranks' failures."""

    def __init__(
        self, *, rank: int, world: int, timeout_s: float, store: Store | None = None,
        backends: Sequence[Any] = (), tick_s: float = TICK_S,
    ) -> None:  # fmt: skip
        """backends: NCCL backends to abort when a rank is lost."""
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._store, self._backends, self._tick_s = store, list(backends), tick_s
        self._queues: dict[str, _Queue] = {}
        self._releases: list[Callable[[], None]] = []
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._closed = Event()
        self._device_error = ""
        self.cause: str | None = None
        """why the ranks cannot continue"""
        self._device: torch.device | None = None

    # --- operations in flight ---

    def expect(self, queue: str, what: str, done: Callable[[], bool], device: torch.device | None = None) -> None:
        """Register something a device waits for; entries of one queue finish in order."""
        self.check(what)
        with self._lock:
            self._device = self._device or device
            entry = _Expected(what=what, done=done, since=monotonic())
            self._queues.setdefault(queue, _Queue()).waiting.append(entry)
            if not self._threads and not self._closed.is_set():
                names = {"equilibra-watch": self._run, "equilibra-watch-device": self._ask}
                self._threads = [Thread(target=run, name=name, daemon=True) for name, run in names.items()]
                for thread in self._threads:
                    thread.start()

    @contextmanager
    def during(self, what: str, device: torch.device) -> Iterator[None]:
        """Register a call of the host that may itself wait for other ranks, as NCCL's do when they connect a pair."""
        over = Event()
        self.expect("calls", what, over.is_set, device)
        try:
            yield
        finally:
            over.set()

    def release_with(self, release: Callable[[], None]) -> None:
        """Call `release` when a rank is lost, so that no stream waits for its signals."""
        with self._lock:
            self._releases.append(release)

    def forget(self, release: Callable[[], None]) -> None:
        """Undo `release_with`."""
        with self._lock, suppress(ValueError):
            self._releases.remove(release)

    def check(self, what: str) -> None:
        if self.cause is not None:
            raise self.lost(what)

    def finish(self, event: torch.cuda.Event, what: str) -> None:
        """Block the host until the device reaches an event."""
        self.until(event.query, what)

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Poll `done` until it is true; RankLostError after the timeout."""
        end = monotonic() + self.timeout_s
        while not done():
            self.check(what)
            if monotonic() > end:
                raise self.lost(what, f"waited for {what} longer than the timeout of {self.timeout_s:g} s")
            sleep(2e-4)

    # --- a rank is lost ---

    def lost(self, what: str, reason: str = "") -> RankLostError:
        """The error of a call that cannot finish, with the first cause any rank reported."""
        self._lose(reason or f"cannot finish {what}")
        return RankLostError(f"{what} did not finish: {self.cause}{self._absent}; {ADVICE}")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails, so that nobody waits for it."""
        self._lose(f"failed with {type(error).__name__}: {first_line(error)}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.cause is None:
                self.cause = self._told(f"rank {self.rank} {reason}") or f"rank {self.rank} {reason}"
        self._let_go()

    def _told(self, cause: str | None) -> str | None:
        """The first cause in the store; `cause` becomes it if there is none."""
        if cause is None:
            return self._asked(lambda store: store.get(CAUSE).decode() if store.check([CAUSE]) else None)
        return self._asked(lambda store: store.compare_set(CAUSE, "", cause).decode()) or cause

    def _asked(self, call: Callable[[Store], _T]) -> _T | None:
        """The store's answer; None from now on if there is none, because its process is gone or stopped.

        Calls of a TCPStore wait for a stopped process whatever the store's timeout, so they have a thread of their own.
        """
        if self._store is None:
            return None
        answers: list[_T] = []

        def ask(store: Store) -> None:
            with suppress(RuntimeError, dist.DistError):
                answers.append(call(store))

        thread = Thread(target=ask, args=(self._store,), name="equilibra-watch-store", daemon=True)
        thread.start()
        thread.join(STORE_S)
        if not answers:
            self._store = None
            return None
        return answers[0]

    def _let_go(self) -> None:
        """Release everything on this rank's device that waits for other ranks."""
        with self._lock:
            releases, backends, self._backends = list(self._releases), self._backends, []
        for release in releases:
            release()
        if self._threads:
            self._asked(lambda store: store.set(f"here {self.rank}", ""))
        threads = [Thread(target=_abort, args=(backend,), daemon=True) for backend in backends]
        for thread in threads:  # all at once: each waits for the device, which may wait for another one
            thread.start()
        end = monotonic() + ANSWER_S
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))

    @cached_property
    def _absent(self) -> str:
        """Which ranks do not answer a roll call, if the cause does not say it."""
        if not self._threads or " failed with " in (self.cause or ""):
            return ""

        def silent(store: Store) -> list[int]:
            return [rank for rank in range(self.world) if not store.check([f"here {rank}"])]

        end, absent = monotonic() + ANSWER_S, self._asked(silent)
        while absent and monotonic() < end:
            sleep(0.02)
            absent = self._asked(silent)
        if absent is None:
            return ""
        if not absent:
            return "; the processes of all ranks are alive, so one is stuck or slower than the timeout"
        return f"; rank {', '.join(map(str, absent))} does not answer: its process is gone or stopped"

    # --- the threads ---

    def _run(self) -> None:
        while not self._closed.wait(self._tick_s):
            if self.cause is None:
                self._look()
            else:  # work queued before may have overwritten the signals since
                for release in list(self._releases):
                    release()

    def _look(self) -> None:
        told = self._told(None)
        if told is not None:
            self.cause = told
            self._let_go()
            return
        reason = self._device_error or next((reason for reason in map(_failed, self._backends) if reason), None)
        for queue in self._every_queue():
            reason = reason or self._overdue(queue)
        if reason:
            self._lose(reason)

    def _every_queue(self) -> list[_Queue]:
        with self._lock:
            return list(self._queues.values())

    def _overdue(self, queue: _Queue) -> str | None:
        """The reason to give up the first operation that is not done, if it is overdue."""
        first = next(iter(tuple(queue.waiting)), None)
        if first is not None and monotonic() - max(first.since, queue.moved_on) > self.timeout_s:
            return f"waited for {first.what} longer than the timeout of {self.timeout_s:g} s"
        return None

    def _ask(self) -> None:
        """Drop finished operations from the queues."""
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                _allow_queries_during_capture()
            while not self._closed.wait(self._tick_s):
                for queue in self._every_queue():
                    while queue.waiting and queue.waiting[0].done():
                        queue.waiting.popleft()
                        queue.moved_on = monotonic()
        except RuntimeError as error:
            self._device_error = f"failed with {type(error).__name__}: {first_line(error)}"

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(STORE_S)


def first_line(error: BaseException, most: int = 600) -> str:
    """First line of an error's text, or its type if it has none."""
    return str(error).strip().splitlines()[0][:most] if str(error).strip() else type(error).__name__


def nccl_of(group: dist.ProcessGroup) -> Any:  # noqa: ANN401 - torch without NCCL has no type for it
    """The NCCL backend of a group; None if it has none."""
    with suppress(RuntimeError):  # the group has no backend for GPUs
        backend = group._get_backend(torch.device("cuda", 0))  # noqa: SLF001
        return backend if backend.name() == dist.Backend.NCCL else None
    return None


def _abort(backend: Any) -> None:  # noqa: ANN401
    with suppress(RuntimeError, dist.DistError):
        backend.abort()


def _failed(backend: Any) -> str | None:  # noqa: ANN401
    """Why a communicator is unusable, as far as torch tells."""
    error = str(backend.get_error()).rpartition(".")[2]
    return None if error == "SUCCESS" else f"found a communicator broken ({error})"


def _allow_queries_during_capture() -> None:
    """Allow this thread to query events while another captures a CUDA graph."""
    relaxed = ctypes.c_int(2)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


@contextmanager
def without_torch_watchdog() -> Iterator[None]:
    """NCCL groups made inside leave error handling to us."""
    wanted = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50",  # four times as long a group with an error takes no calls
    }  # fmt: skip
    with environment_with(wanted):
        yield
