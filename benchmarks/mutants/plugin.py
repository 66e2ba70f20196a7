"""A pytest plugin that makes tests cheap: forked ranks, few examples, and a time limit for each test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Generator, Mapping
from typing import Any

import hypothesis
import pytest

from benchmarks.mutants.seen import Seen

TIMES = 5
"""a test may take so many times what it takes without a mutant, beyond the limit"""


class TooSlowError(BaseException):
    """A test exceeded its limit; not an Exception, so that no test can expect it."""


class Plugin:
    """One session: `seconds` has the CPU time of every passed test, `failed` the other tests."""

    def __init__(self, *, cpu_s: float, wall_s: float, only: Mapping[str, float] | None, watch: bool) -> None:
        """only: these tests, in this order, with what they cost. watch: note the lines that tests run."""
        self.cpu_s, self.wall_s, self.only = cpu_s, wall_s, only
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.failed: list[str] = []
        self.late: list[str] = []
        self._seen = Seen() if watch else None
        self._fixtures: dict[tuple[str, str], float] = {}
        self._skipped = False
        hypothesis.settings.register_profile(
            "mutants", derandomize=True, database=None, deadline=None, max_examples=20,
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        )  # fmt: skip
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.only is not None:
            place = {name: at for at, name in enumerate(self.only)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_collection_finish(self) -> None:
        """Fork ranks from this process, which has the mutant."""
        ranks: Any = sys.modules.get("tests.distributed.ranks")
        if ranks is not None:
            ranks.CONTEXT = multiprocessing.get_context("fork")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, None]:  # noqa: ANN401
        """Count shared fixtures for every test that uses them: each may be the only one that runs."""
        before = _cpu_s()
        yield
        if request.scope != "function":
            self._fixtures[fixturedef.argname, request.node.nodeid] = _cpu_s() - before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, None]:  # noqa: ANN401

        def late(*_: object) -> None:
            self.late.append(item.nodeid)
            raise TooSlowError

        more = TIMES * (self.only or {}).get(item.nodeid, 0.0)
        for number, timer, limit in (
            (signal.SIGPROF, signal.ITIMER_PROF, self.cpu_s), (signal.SIGALRM, signal.ITIMER_REAL, self.wall_s)
        ):  # fmt: skip
            signal.signal(number, late)
            signal.setitimer(timer, limit + more, 10.0)
        before, failures = _cpu_s(), len(self.failed)
        self._skipped, shared = False, set(self._fixtures)
        if self._seen is not None:
            self._seen.start()
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        lines = self._seen.stop() if self._seen is not None else {}
        if len(self.failed) == failures and not self._skipped:
            reused = sum(
                cost for (name, node), cost in self._fixtures.items()
                if (name, node) in shared and name in item.fixturenames and item.nodeid.startswith(node)
            )  # fmt: skip
            self.seconds[item.nodeid] = round(_cpu_s() - before + reused, 2)
            self.lines[item.nodeid] = lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._skipped |= report.skipped
        if report.failed:
            self.failed.append(report.nodeid)


def _cpu_s() -> float:
    return sum(os.times()[:4])
