"""Results of a bench suite as JSON and as Markdown tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import Suite
from equilibra.core.atomic import atomic_file
from equilibra.core.errors import InputError

__all__ = ["earlier_results", "markdown", "plain", "write_results"]

Row = dict[str, Any]


def plain(rows: list[Row]) -> list[Row]:
    """Rows with Python numbers only, floats to six digits."""

    def one(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, np.integer):
            return int(value)
        return float(f"{value:.6g}") if isinstance(value, (float, np.floating)) else value

    return [{key: one(value) for key, value in row.items()} for row in rows]


def markdown(suite: Suite, result: dict[str, Any]) -> str:
    """One table per section, with the command, commit, day and machine that made it."""
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
    """Sections that an earlier run left in the folder; an error if the file is not ours."""
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
