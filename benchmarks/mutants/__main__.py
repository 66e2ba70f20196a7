"""Make a sample of mutants, run each against the nearest tests, and write what survived."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

os.environ["NUMBA_DISABLE_JIT"] = "1"  # before anything loads numba
os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.mutants.nearest import nearest_tests
from benchmarks.mutants.run import load_libraries, tried
from benchmarks.mutants.sample import SOURCE, Mutant, mutated, sample
from benchmarks.mutants.table import write_results

TEST_CPU_S, TEST_WALL_S, MUTANT_WALL_S = 30.0, 400.0, 1200.0
BASELINE_WALL_S = 20.0
"""tests that take longer cost more than a mutant's budget"""
JUDGED = Path(__file__).with_name("judged.json")
"""survivors that were looked at and change nothing: why"""
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--mutants", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2, help="processes beside each other")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of tests for a mutant")
    parser.add_argument("--again", action="store_true", help="run survivors once more, after tests were added")
    parser.add_argument("--work", type=Path, default=Path("/tmp/equilibra-mutants"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.mutants < 1 or asked.lanes < 1:
        parser.error(f"--mutants {asked.mutants} --lanes {asked.lanes}: both must be at least 1")
    asked.work.mkdir(parents=True, exist_ok=True)
    raw = asked.work / f"mutants-{asked.seed}.jsonl"
    mutants = sample(asked.mutants, asked.seed)
    done = {key(record): record for record in records(raw)}
    settled = {name for name, record in done.items() if record["killed_by"] or not asked.again}
    todo = [mutant for mutant in mutants if key(mutant.as_dict()) not in settled]
    print(f"{len(mutants)} mutants, {len(todo)} to run", flush=True)
    load_libraries()
    children = []
    for lane in range(asked.lanes):
        pid = os.fork()
        if pid == 0:
            try:
                for mutant in todo[lane :: asked.lanes]:
                    append(raw, run(mutant, asked))
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    keys = {key(mutant.as_dict()) for mutant in mutants}
    write_results(
        [record for record in records(raw) if key(record) in keys], json.loads(JUDGED.read_text()), asked.output,
        command=f"python -m benchmarks.mutants --mutants {asked.mutants} --seed {asked.seed}", budget=asked.budget,
        limit=TEST_CPU_S,
    )  # fmt: skip
    return 0


def run(mutant: Mutant, asked: argparse.Namespace) -> dict[str, object]:
    """What became of a mutant."""
    begin, source = monotonic(), mutated(mutant)
    seconds, ran, failed = 0.0, 0, []
    for files, tests in batches(nearest_tests(mutant.file), asked):
        outcome = tried(
            files, file=mutant.file, source=source, only=tests, cpu_s=TEST_CPU_S, wall_s=TEST_WALL_S,
            limit_s=MUTANT_WALL_S,
        )  # fmt: skip
        ran += len(outcome.seconds)
        seconds += sum(outcome.seconds.values())
        failed = outcome.failed
        if failed:
            break
    before = (SOURCE / mutant.file).read_text().splitlines()
    changes = difflib.unified_diff(before, source.splitlines(), n=0, lineterm="")
    diff = [line for line in changes if line[:3] not in ("---", "+++") and line[:2] != "@@"]
    return {
        **mutant.as_dict(), "killed_by": failed[0] if failed else "", "tests": ran, "cpu_s": round(seconds, 2),
        "seconds": round(monotonic() - begin, 1), "diff": "\n".join(diff),
    }  # fmt: skip


def batches(files: Sequence[str], asked: argparse.Namespace) -> Iterator[tuple[list[str], list[str]]]:
    """Files and those of their tests that fit the budget: near files first, cheap tests of a file first.

    Each batch has twice the files of the one before, so a mutant that near tests kill never times far ones.
    """
    left, begin, size = asked.budget, 0, 2
    while begin < len(files):
        some, tests = files[begin : begin + size], []
        begin, size = begin + size, size * 2
        for file in some:
            cost = baseline(file, asked.work)
            for test in sorted(cost, key=lambda name: cost[name]):
                if cost[test] > left:
                    break
                tests.append(test)
                left -= cost[test]
        if tests:
            yield list(some), tests


def baseline(file: str, work: Path) -> dict[str, float]:
    """CPU seconds of the tests of a file that pass without a mutant."""
    known = work / "baseline" / f"{file.replace('/', '.')}.json"
    if not known.exists():
        known.parent.mkdir(exist_ok=True)
        outcome = tried([file], cpu_s=4.0, wall_s=BASELINE_WALL_S, limit_s=3000.0)
        part = known.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(outcome.seconds))
        part.rename(known)
        spent = sum(outcome.seconds.values())
        print(f"{file}: {len(outcome.seconds)} tests, {spent:.1f} CPU s, left out {len(outcome.failed)}", flush=True)
    found: dict[str, float] = json.loads(known.read_text())
    return found


def key(record: dict[str, object]) -> tuple[object, ...]:
    """What tells mutants apart."""
    return record["file"], record["operator"], record["occurrence"]


def records(raw: Path) -> list[dict[str, object]]:
    """The newest of each mutant."""
    lines = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    return list({key(line): line for line in lines}.values())


def append(raw: Path, record: dict[str, object]) -> None:
    """At once."""
    file = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, json.dumps(record).encode() + b"\n")
    os.close(file)


if __name__ == "__main__":
    sys.exit(main())
