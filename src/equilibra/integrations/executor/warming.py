"""Compile the planner while the model loads, once on a machine, so that no step waits for the compiler.

The first plan of a process compiles it with numba: seconds of a free core, minutes where many ranks share a few.
`warm_up` does that in a background thread by planning a made-up step. Processes of a machine take turns, by a lock on
a file in numba's cache folder: the first compiles, the others load what it has cached. Where there is no such folder,
or it cannot be locked, each compiles for itself.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from equilibra.execute.steps.planning import cache_folder, warm

logger = logging.getLogger(__name__)

LOCK = "equilibra-compiles.lock"


class WarmUp:
    """A warm-up that is running in the background."""

    def __init__(self, num_nodes: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(num_nodes,), name="equilibra-warm-up", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread.is_alive():
            start = time.perf_counter()
            self._thread.join()
            logger.info("the first plan waited %.1f s for its code to be compiled", time.perf_counter() - start)

    def _run(self, num_nodes: int) -> None:
        start = time.perf_counter()
        with one_at_a_time(cache_folder()):
            waited = time.perf_counter() - start
            try:
                warm(num_nodes)
            except Exception:  # a plan that needs the same code raises it where it can be handled
                logger.warning("the planner could not be compiled ahead of the first step", exc_info=True)
                return
        taken = time.perf_counter() - start - waited
        logger.info("the planner was ready after %.1f s, and %.1f s of waiting for another process", taken, waited)


def warm_up(num_nodes: int) -> WarmUp:
    """Start to compile the planner for expert-parallel groups on so many nodes, once in a process."""
    return _warm_up(min(num_nodes, 2))  # more nodes use the code of two


_warm_up = cache(WarmUp)


@contextmanager
def one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Hold a lock that the processes with this cache folder share; it ends with its process. None: no lock."""
    with ExitStack() as stack:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / LOCK).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        except OSError as error:
            logger.info("every process compiles for itself: cannot lock %s in %s (%s)", LOCK, folder, error)
        yield
