"""The table: mutants killed, and the survivors with reasons."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ABOUT = """\
Cosmic Ray's operators, drawn evenly from the places that can change in `src/equilibra/plan` and
`src/equilibra/execute`; a place counts once for each kind of change. Left out: files that need a GPU (Triton kernels,
copies between GPUs), annotations, options of dataclasses, `is` for `==`. A mutant runs against the tests that run its
line, then those that call its function, cheap ones first, until one fails: at most {budget:g} CPU seconds of tests as
they take under a tracer. Files with numba kernels run as plain Python, with tests of at most 5 CPU seconds; the others
with compiled kernels. A test that takes {limit:g} CPU seconds more than five times what it takes without the mutant
fails: that is how endless loops end. Failures that time may have caused are tried without the mutant. Property tests
have 20 examples, slow tests do not run. What survives of the planner meets all golden plans (`--golden`). The rest may
still be killed by `make test-all`."""


def write_results(
    records: Sequence[dict[str, Any]], judged: Mapping[str, str], output: Path, *, command: str, budget: float,
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
        f"{len(same)} of the others change nothing that can be seen: of the rest, {killed / counted:.1%}.", "",
        "| part | mutants | killed |", "|---|---|---|",
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


def name_of(record: Mapping[str, Any]) -> str:
    """A mutant's name in `judged.json`."""
    return f"{record['file']} {record['operator'].removeprefix('core/')} {record['occurrence']}"


def _part(record: Mapping[str, Any]) -> str:
    return str(Path(record["file"]).parent)
