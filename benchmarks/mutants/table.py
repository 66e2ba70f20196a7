"""The table: mutants killed, and the survivors with reasons."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Name = tuple[str, str, str]
"""file, and the changed lines before and after"""
ABOUT = """\
Mutants by Cosmic Ray's operators, drawn evenly from all changeable places in `src/equilibra/plan` and
`src/equilibra/execute`; a place counts once for each kind of change. Left out: files that need a GPU (Triton kernels,
copies between GPUs), annotations, options of dataclasses, `is` for `==`. A mutant meets the tests that run its line,
then those that call its function, cheapest first, until one fails, for at most {budget:g} CPU seconds of tests as timed
under a tracer. Files with numba kernels run as plain Python, with tests of at most 5 CPU seconds; the others with
compiled kernels. A test fails if it takes {limit:g} CPU seconds more than five times its usual time, which ends endless
loops. Failures that timing may explain are repeated without the mutant. Property tests run 20 examples; slow tests do
not run. Surviving planner mutants also meet whole files of the planner's tests and all golden plans (`--golden`), and
tests that were written for them. `make test-all` may kill more."""


def write_results(
    records: Sequence[dict[str, Any]], judged: Mapping[Name, str], output: Path, *, command: str, budget: float,
    limit: float, drawn: int,
) -> None:  # fmt: skip
    """Write OUTPUT/mutants.md and .json. judged: by `name_of`, why a survivor cannot be killed. drawn: the sample."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    ordered = sorted(records, key=lambda record: (record["file"], record["line"], record["column"]))
    alive = [record for record in ordered if not record["killed_by"]]
    same = [record for record in alive if name_of(record) in judged]
    counted, killed = len(ordered) - len(same), len(ordered) - len(alive)
    lines = [
        "# Mutants", "",
        f"`{command}`, commit {commit.stdout.strip()}, {datetime.now(UTC):%Y-%m-%d}. Measured.", "",
        ABOUT.format(budget=budget, limit=limit), "",
        f"**{killed} of {len(ordered)} killed ({killed / len(ordered):.1%}).** {drawn} were drawn.", "",
        f"{len(same)} of the others change no observable behaviour; without them {killed / counted:.1%} were killed.",
        "", "| part | mutants | killed |", "|---|---|---|",
    ]  # fmt: skip
    parts = Counter(_part(record) for record in ordered)
    dead = Counter(_part(record) for record in ordered if record["killed_by"])
    lines += [f"| `{part}` | {count} | {dead[part]} |" for part, count in sorted(parts.items())]
    lines += ["", "## Survivors", ""]
    for record in alive:
        why = judged.get(name_of(record), "not killed by the tests that ran")
        lines += [f"- `{record['file']}:{record['line']}`: {why}", "", "  ```diff"]
        lines += [f"  {line}" for line in record["diff"].splitlines()] + ["  ```", ""]
    (output / "mutants.md").write_text("\n".join(lines).rstrip() + "\n")
    (output / "mutants.json").write_text(json.dumps({"command": command, "mutants": ordered}, indent=1) + "\n")


def name_of(record: Mapping[str, Any]) -> Name:
    """What a mutant changes, wherever in its file that stands."""
    lines = record["diff"].splitlines()
    before, after = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return record["file"], before, after


def judged_in(file: Path) -> dict[Name, str]:
    """Why survivors that were looked at change nothing."""
    return {(one["file"], one["before"], one["after"]): one["why"] for one in json.loads(file.read_text())}


def _part(record: Mapping[str, Any]) -> str:
    return str(Path(record["file"]).parent)
