"""Make a sample of mutants, run each against the tests that run its line, and write what survived."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from time import monotonic

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads torch

from benchmarks.mutants.covering import Test, compiled, covering_tests, known_tests
from benchmarks.mutants.run import Outcome, load_libraries, tried
from benchmarks.mutants.sample import SOURCE, Mutant, mutated, sample
from benchmarks.mutants.table import judged_in, name_of, write_results

TEST_CPU_S, TEST_WALL_S, MUTANT_WALL_S = 4.0, 60.0, 600.0
"""limits of a test beyond five times what it takes without a mutant, and of all tests of a mutant"""
FIRST_TESTS = (10, 60)
"""so many run before the files of others are loaded"""
GOLDEN = (
    *(f"tests/unit/plan/test_{name}.py" for name in ("plan_kernels", "baselines", "plan_pack", "plan_reorder",
                                                     "plan_relevel", "plan_replicate", "plan_prices", "plan_stand")),
    "tests/golden/test_baseline_plans.py", "tests/golden/test_plans.py",
)  # fmt: skip
GOLDEN_CPU_S = 60.0
"""limit of a test of these files; each takes at most 5 as plain Python"""
JUDGED = Path(__file__).with_name("judged.json")
"""survivors that were looked at and change nothing: why"""
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Run the sample and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--mutants", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1, help="parallel processes")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of tests for a mutant")
    parser.add_argument("--again", action="store_true", help="run survivors once more, after tests were added")
    parser.add_argument(
        "--golden",
        action="store_true",
        help="run survivors of plan/ against whole files of its tests and all golden plans",
    )
    parser.add_argument(
        "--only", default="", help="only mutants of files whose name starts with this; the table has all"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/equilibra-mutants"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.mutants < 1 or asked.lanes < 1:
        parser.error(f"--mutants {asked.mutants} --lanes {asked.lanes}: both must be at least 1")
    asked.work.mkdir(parents=True, exist_ok=True)
    raw = asked.work / f"mutants-{asked.seed}.jsonl"
    mutants = drawn(asked)
    judged = judged_in(JUDGED)
    done = {key(record): record for record in records(raw)}
    settled = {name for name, record in done.items() if record["killed_by"] or not (asked.again or asked.golden)}
    settled |= {name for name, record in done.items() if name_of(record) in judged}
    todo = [mutant for mutant in mutants if key(mutant.as_dict()) not in settled]
    todo = [mutant for mutant in todo if mutant.file.startswith("plan/" if asked.golden else asked.only)]
    print(f"{len(mutants)} mutants, {len(todo)} to run", flush=True)
    for jit in (True, False):
        if some := [mutant for mutant in todo if (compiled(mutant.file) and not asked.golden) == jit]:
            in_fork(raw, some, asked, jit=jit)
    keys = {key(mutant.as_dict()) for mutant in mutants}
    write_results(
        [record for record in records(raw) if key(record) in keys], judged, asked.output,
        command=f"python -m benchmarks.mutants --mutants {asked.mutants} --seed {asked.seed}", budget=asked.budget,
        limit=TEST_CPU_S, drawn=len(mutants),
    )  # fmt: skip
    return 0


def drawn(asked: argparse.Namespace) -> list[Mutant]:
    """The sample; stored in a file, because drawing it parses every file many times."""
    state = sha256(
        b"".join(path.read_bytes() for part in ("plan", "execute") for path in sorted((SOURCE / part).rglob("*.py")))
    )
    kept = Path(asked.work / f"sample-{asked.mutants}-{asked.seed}-{state.hexdigest()[:12]}.json")
    if not kept.exists():
        kept.write_text(json.dumps([mutant.as_dict() for mutant in sample(asked.mutants, asked.seed)]))
    return [Mutant(**told) for told in json.loads(kept.read_text())]


def in_fork(raw: Path, mutants: list[Mutant], asked: argparse.Namespace, *, jit: bool) -> None:
    """Run them from a process of their own, because numba compiles in it or does not."""

    def lanes() -> None:
        load_libraries(jit=jit)
        tests = [] if asked.golden else known_tests(asked.work, jit=jit)

        def lane(number: int) -> None:
            for mutant in mutants[number :: asked.lanes]:
                append(raw, run_golden(mutant) if asked.golden else run(mutant, tests, asked.budget))

        end_of([forked(partial(lane, number)) for number in range(asked.lanes)])

    end_of([forked(lanes)])


def forked(what: Callable[[], None]) -> int:
    """Fork a process for it; returns its id."""
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it is
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def end_of(processes: list[int]) -> None:
    """Wait until all processes have ended."""
    for pid in processes:
        os.waitpid(pid, 0)


def run(mutant: Mutant, tests: list[Test], budget: float) -> dict[str, object]:
    """The outcome of a mutant."""
    begin, source = monotonic(), mutated(mutant)
    chosen = covering_tests(mutant, tests, budget)
    failed, late, ran = "", False, 0
    for first, end in pairwise((0, *FIRST_TESTS, len(chosen))):
        left = {test.name: test.cost for test in chosen[first:end]}
        while left and not failed:
            outcome = outcome_of(left, mutant.file, source)
            ran += len(outcome.seconds)
            if outcome.failed and fails_for_it(outcome, left):
                failed, late = outcome.failed[0], bool(outcome.late)
            elif outcome.failed:
                print(f"{mutant.file}:{mutant.line}: {outcome.failed} also fails without the mutant", flush=True)
            over = {*outcome.failed, *outcome.seconds} if outcome.failed else set(left)
            left = {name: cost for name, cost in left.items() if name not in over} if over & set(left) else {}
    return record_of(mutant, source, failed, late=late, tests=ran, of=len(chosen), seconds=monotonic() - begin)


def run_golden(mutant: Mutant) -> dict[str, object]:
    """The outcome of a planner mutant under all golden plans."""
    begin, source = monotonic(), mutated(mutant)
    outcome = tried(
        GOLDEN, file=mutant.file, source=source, stop=True, cpu_s=GOLDEN_CPU_S, wall_s=TEST_WALL_S,
        limit_s=MUTANT_WALL_S,
    )  # fmt: skip
    killed = bool(outcome.failed) and fails_for_it(outcome, dict.fromkeys(outcome.failed, 0.0))
    failed = outcome.failed[0] if killed else ""
    number = len(outcome.seconds) + len(outcome.failed)
    return record_of(
        mutant, source, failed, late=bool(outcome.late), tests=number, of=number, seconds=monotonic() - begin
    )


def record_of(
    mutant: Mutant, source: str, killed_by: str, *, late: bool, tests: int, of: int, seconds: float
) -> dict[str, object]:
    """A line of the raw results."""
    before = (SOURCE / mutant.file).read_text().splitlines()
    changes = difflib.unified_diff(before, source.splitlines(), n=0, lineterm="")
    diff = [line for line in changes if line[:3] not in ("---", "+++") and line[:2] != "@@"]
    return {
        **mutant.as_dict(), "killed_by": killed_by, "too_slow": late and bool(killed_by), "tests": tests, "of": of,
        "seconds": round(seconds, 1), "diff": "\n".join(diff),
    }  # fmt: skip


def outcome_of(tests: dict[str, float], file: str = "", source: str = "") -> Outcome:
    """Run tests until one fails; returns the outcome."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    return tried(
        files, file=file, source=source, only=tests, cpu_s=TEST_CPU_S, wall_s=TEST_WALL_S, limit_s=MUTANT_WALL_S
    )


def fails_for_it(outcome: Outcome, tests: dict[str, float]) -> bool:
    """Whether time-dependent tests pass without the mutant, so that the mutant explains the failure."""
    failed = {name: tests.get(name, 0.0) for name in outcome.failed if name in tests}
    if not failed:  # the process died, never ended or could not load the tests
        return not outcome_of(tests).failed
    if not outcome.late and not any("/distributed/" in name for name in failed):
        return True
    return not outcome_of(failed).failed


KEY = ("file", "operator", "occurrence")


def key(record: dict[str, object]) -> tuple[object, ...]:
    """The identity of a mutant."""
    return tuple(record[name] for name in KEY)


def records(raw: Path) -> list[dict[str, object]]:
    """The newest record of each mutant."""
    lines = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    return list({key(line): line for line in lines}.values())


def append(raw: Path, record: dict[str, object]) -> None:
    """Append a record in one write, because several processes do."""
    file = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, json.dumps(record).encode() + b"\n")
    os.close(file)


if __name__ == "__main__":
    sys.exit(main())
