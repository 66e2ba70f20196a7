"""The lines of `plan/` and `execute/` that a test runs, in its own process and in the ranks it forks.

A function that has run `ENOUGH` lines in one test is no longer traced; only the call is kept.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.mutants.sample import SOURCE

WATCHED = (f"{SOURCE}/plan/", f"{SOURCE}/execute/")
ENOUGH = 3000


class Seen:
    """Records the lines that one test runs, in this process and its forks."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._events: Counter[CodeType] = Counter()
        self._folder = Path(tempfile.mkdtemp(prefix="equilibra-seen-"))
        leave = os._exit

        def tell_and_leave(status: int) -> None:
            sys.settrace(None)
            (self._folder / str(os.getpid())).write_text(json.dumps(sorted(self.lines)))
            leave(status)

        os._exit = tell_and_leave  # type: ignore[assignment] # how ranks end

    def start(self) -> None:
        """Start recording anew."""
        self.lines.clear()
        self._events.clear()
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self) -> dict[str, list[int]]:
        """The lines of each file below src/equilibra, and the first lines of the functions that were called."""
        sys.settrace(None)
        threading.settrace(None)
        for part in self._folder.iterdir():
            self.lines |= {(file, line) for file, line in json.loads(part.read_text())}
            part.unlink()
        found: dict[str, list[int]] = {}
        for file, line in sorted(self.lines):
            found.setdefault(file.removeprefix(f"{SOURCE}/"), []).append(line)
        return found

    def _called(self, frame: FrameType, event: str, told: Any) -> Any:  # noqa: ANN401, ARG002
        code = frame.f_code
        if not code.co_filename.startswith(WATCHED):
            return None
        self.lines.add((code.co_filename, code.co_firstlineno))
        return self._ran if self._events[code] < ENOUGH else None

    def _ran(self, frame: FrameType, event: str, told: Any) -> Any:  # noqa: ANN401, ARG002
        if event == "line":
            code = frame.f_code
            self.lines.add((code.co_filename, frame.f_lineno))
            self._events[code] += 1
            frame.f_trace_lines = self._events[code] < ENOUGH
        return self._ran
