"""A bench suite: named sections, each a function from a setting to rows, and how their results are shown and stored."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from equilibra.core.atomic import atomic_file
from equilibra.core.errors import InputError
from equilibra.plan.step import usable_cores

Row = dict[str, Any]
"""a row of a table, by column"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of a bench run."""

    traces: Path | None
    """folder with routing recordings; sections that need it are left out without it"""
    quick: bool = False
    """few repeats, to see that everything runs; not for reporting"""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A bench: its sections, and the text of its files."""

    name: str
    """name of the command and of the files"""
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
    """draws pictures of the given sections into a folder"""


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
    """Machine and versions; the commit is $EQUILIBRA_COMMIT if git does not know it."""
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


def spread(values: Iterable[Any]) -> dict[str, Any]:
    """Median, least, largest, and all values."""
    numbers = [float(value) for value in values]
    return {"median": median(numbers), "low": min(numbers), "high": max(numbers), "repeats": numbers}


def plain(rows: list[Row]) -> list[Row]:
    """Rows with Python numbers only; floats keep six digits."""

    def one(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, np.integer):
            return int(value)
        return float(f"{value:.6g}") if isinstance(value, (float, np.floating)) else value

    return [{key: one(value) for key, value in row.items()} for row in rows]


def markdown(suite: Suite, result: dict[str, Any]) -> str:
    """One table per section, with its command, commit, date and machine."""
    parts = [f"# {suite.title}", suite.intro]
    for name, section in result["sections"].items():
        rows = section["rows"]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        table = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        table += ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows]
        made = ", ".join(f"{key} {value}" for key, value in section["measured_on"].items())
        parts += [f"## {suite.titles[name]}", f"`{section['command']}`, {made}", "\n".join(table)]
        if name in suite.notes:
            parts.append(suite.notes[name])
    return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if 0.99 < value < 2 else f"{value:.4g}"
    return str(value)


def earlier_results(suite: Suite, folder: Path) -> dict[str, Any]:
    """Sections that an earlier run left in the folder; an error if the file is not a suite's."""
    file = folder / f"{suite.name}.json"
    if not file.is_file():
        return {}
    try:
        sections = json.loads(file.read_text())["sections"]
        return {
            name: sections[name] for name in sections if {"rows", "command", "measured_on"} <= sections[name].keys()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{file} is not a result of this bench; move it away, or choose another folder") from None


def write_results(suite: Suite, result: dict[str, Any], folder: Path) -> None:
    """Write the suite's .json, .md and pictures; sections that were not run are kept."""
    sections = {**earlier_results(suite, folder), **result["sections"]}
    result = {**result, "sections": {name: sections[name] for name in suite.sections if name in sections}}
    with atomic_file(folder / f"{suite.name}.json", overwrite=True) as part:
        part.write_text(json.dumps(result, indent=1) + "\n")
    with atomic_file(folder / f"{suite.name}.md", overwrite=True) as part:
        part.write_text(markdown(suite, result))
    if suite.plot is not None:
        suite.plot({name: section["rows"] for name, section in result["sections"].items()}, folder)
