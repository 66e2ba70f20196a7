"""A pytest plugin that makes tests cheap: forked ranks, few examples, and a limit for each test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Generator, Sequence
from typing import Any

import hypothesis
import pytest

__all__ = ["Plugin"]


class TooSlowError(BaseException):
    """Not an Exception, so that no test takes it for what it expects."""


class Plugin:
    """Of one session; `seconds` holds the tests that passed, with the CPU time they took, `failed` the others."""

    def __init__(self, *, cpu_s: float, wall_s: float, only: Sequence[str] | None) -> None:
        """only: these tests, in this order."""
        self.cpu_s, self.wall_s, self.only = cpu_s, wall_s, only
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._skipped = False
        hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None, max_examples=20)
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the others out."""
        if self.only is not None:
            place = {name: at for at, name in enumerate(self.only)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_collection_finish(self) -> None:
        """Ranks are forked from this process: it has the mutant."""
        ranks: Any = sys.modules.get("tests.distributed.ranks")
        if ranks is not None:
            ranks.CONTEXT = multiprocessing.get_context("fork")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Run a test with its fixtures, for so long."""

        def late(*_: object) -> None:
            raise TooSlowError

        for number, timer, limit in (
            (signal.SIGPROF, signal.ITIMER_PROF, self.cpu_s), (signal.SIGALRM, signal.ITIMER_REAL, self.wall_s)
        ):  # fmt: skip
            signal.signal(number, late)
            signal.setitimer(timer, limit)
        before, failures = os.times(), len(self.failed)
        self._skipped = False
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if len(self.failed) == failures and not self._skipped:
            self.seconds[item.nodeid] = round(sum(os.times()[:4]) - sum(before[:4]), 2)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of set-up, call and tear-down."""
        self._skipped |= report.skipped
        if report.failed:
            self.failed.append(report.nodeid)
