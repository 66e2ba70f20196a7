"""The tests that run the line a mutant changes, and their cost."""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.run import tried
from benchmarks.mutants.sample import SOURCE, Mutant

TESTS = SOURCE.parents[1] / "tests"
PLAN = ("unit/plan/*.py", "golden/*.py", "property/plan/*.py", "contracts/test_planners.py")
RANKS = (
    "layer", "mini_batches", "training", "counts", "gradients", "checkpoint", "migrate", "safetensors", "stream",
    "failures", "patience", "other_experts",
)  # fmt: skip
PLAIN = ("golden/*.py", "unit/plan/*.py", "property/plan/*.py", "unit/execute/test_shares.py")
COMPILED = (
    "unit/execute/*.py", *PLAN, "property/execute/*.py", *(f"distributed/test_{name}.py" for name in RANKS),
    "contracts/test_imports.py",
)  # fmt: skip
LONGEST_CPU_S, LONGEST_PLAIN_CPU_S, LONGEST_WALL_S = 20.0, 5.0, 90.0
"""a test that takes longer is of no use here"""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test that passes without a mutant."""

    name: str
    cost: float
    """CPU seconds with its fixtures, watched"""
    lines: dict[str, list[int]]
    """lines it runs, by file below src/equilibra"""


def compiled(file: str) -> bool:
    """Whether numba may compile kernels; not in files that contain some, where every mutant would be compiled anew."""
    return "equilibra.core.kernel" not in (SOURCE / file).read_text()


def known_tests(work: Path, *, jit: bool) -> list[Test]:
    """All tests; collected once and kept in `work`."""
    found, folder = [], work / ("compiled" if jit else "plain")
    folder.mkdir(exist_ok=True)
    for pattern in COMPILED if jit else PLAIN:
        for path in sorted(TESTS.glob(pattern)):
            if not path.name.startswith("test_"):
                continue
            file = f"tests/{path.relative_to(TESTS)}"
            known = folder / f"{file.replace('/', '.')}.json"
            if not known.exists() or known.stat().st_mtime < path.stat().st_mtime:
                limit = LONGEST_CPU_S if jit else LONGEST_PLAIN_CPU_S
                outcome = tried([file], watch=True, cpu_s=limit, wall_s=LONGEST_WALL_S, limit_s=3000.0)
                known.write_text(
                    json.dumps({name: [cost, outcome.lines[name]] for name, cost in outcome.seconds.items()})
                )
                spent = sum(outcome.seconds.values())
                print(
                    f"{file}: {len(outcome.seconds)} tests, {spent:.1f} CPU s, left out: {outcome.failed}", flush=True
                )
            told = json.loads(known.read_text()).items()
            found += [Test(name=name, cost=cost, lines=lines) for name, (cost, lines) in told]
    return found


def covering_tests(mutant: Mutant, tests: list[Test], budget: float) -> list[Test]:
    """Tests of a line for this many CPU seconds: those that run it, then those that call its function, cheapest first.

    The n-th case of a parametrized test counts as n times as expensive, so that different tests come early.
    """
    first = _first_line(mutant)
    seen = {test.name: set(test.lines.get(mutant.file, ())) for test in tests}
    near = [test for test in tests if mutant.line in seen[test.name] or (first is None and seen[test.name])]
    far = [test for test in tests if first in seen[test.name] and mutant.line not in seen[test.name]]
    chosen: list[Test] = []
    for group in (near, far):
        case: Counter[str] = Counter()
        rank: dict[str, float] = {}
        for test in sorted(group, key=lambda test: test.cost):
            function = test.name.partition("[")[0]
            case[function] += 1
            rank[test.name] = max(test.cost, 0.02) * case[function]
        for test in sorted(group, key=lambda test: rank[test.name]):
            if test.cost <= budget:
                chosen.append(test)
                budget -= max(test.cost, 0.02)
    return chosen


def _first_line(mutant: Mutant) -> int | None:
    """First line of the innermost function around the change, with its decorators; None outside functions."""
    functions = [
        node for node in ast.walk(ast.parse((SOURCE / mutant.file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]  # fmt: skip
    if not functions:
        return None
    inner = max(functions, key=lambda node: node.lineno)
    return min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
