"""A bench suite: named sections, each a function from a setting to rows, and how their results are shown and kept."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.setting import Row, Setting
from equilibra.plan.step import usable_cores

__all__ = ["Suite", "environment", "run_sections"]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Sections that belong together, and the files they are written to."""

    name: str
    """of the command and of the files"""
    title: str
    """heading of the results"""
    intro: str
    """a sentence under it"""
    sections: dict[str, Callable[[Setting], list[Row]]]
    """by name, in the order they run"""
    titles: dict[str, str]
    """headings of sections"""
    notes: dict[str, str] = field(default_factory=dict)
    """text under tables"""
    need_traces: frozenset[str] = frozenset()
    """sections that cannot run without recordings"""
    need_modules: dict[str, str] = field(default_factory=dict)
    """modules that sections need beyond those of the package"""
    plot: Callable[[dict[str, list[Row]], Path], None] | None = None
    """draws pictures of the sections that are there into a folder"""


def run_sections(
    suite: Suite, setting: Setting, names: list[str], tell: Callable[[str], None]
) -> Iterator[tuple[str, list[Row]]]:
    """Run sections one after another."""
    for name in names:
        tell(name)
        start = perf_counter()
        rows = suite.sections[name](setting)
        tell(f"{name}: {perf_counter() - start:.1f} s")
        yield name, rows


def environment() -> Row:
    """The machine and the versions that made the figures; $EQUILIBRA_COMMIT where git does not know the commit."""
    import numba  # noqa: PLC0415

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": os.environ.get("EQUILIBRA_COMMIT") or (commit.stdout.strip() if commit else "") or "unknown",
        "cpu": cpu,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }
