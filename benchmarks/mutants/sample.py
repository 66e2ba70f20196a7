"""All mutants, and a sample of them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

SOURCE = Path(__file__).resolve().parents[2] / "src" / "equilibra"
NEED_GPU = (
    "execute/kernels/products.py", "execute/kernels/grouped.py", "execute/kernels/rows.py",
    "execute/kernels/__init__.py", "execute/copies/device.py", "execute/copies/device_paths.py",
)  # fmt: skip
"""Triton kernels, and copies between GPUs: the tests in tests/gpu run them"""
SAME_MEANING = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""comparisons with None, and of small numbers, that mean the same"""
NOT_RUN = ("kernel", "inlined", "cache", "overload", "dataclass", "contextmanager", "property", "staticmethod")
"""decorators whose removal either changes nothing in plain Python or breaks every call"""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change."""

    file: str
    """below src/equilibra"""
    operator: str
    """operator of Cosmic Ray"""
    occurrence: int
    """number of the operator's match in the file"""
    line: int
    """changed line"""
    column: int
    """column of the change"""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def mutated(mutant: Mutant) -> str:
    """The source of the file with the mutant's change."""
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    code = mutate_code((SOURCE / mutant.file).read_text(), operator, mutant.occurrence)
    assert code is not None
    return str(code)


def sample(number: int, seed: int) -> list[Mutant]:
    """Mutants drawn evenly from all places that can change.

    Cosmic Ray replaces a `+` in eleven ways and a `<` in seven. A place counts once for each kind of change: otherwise
    most mutants were arithmetic that no type allows, and any test kills those.
    """
    random = Random(seed)
    places: dict[tuple[object, ...], list[Mutant]] = {}
    for mutant in (mutant for file in _files() for mutant in _mutants(file)):
        place = (mutant.file, mutant.line, mutant.column, mutant.operator.partition("_")[0])
        places.setdefault(place, []).append(mutant)
    drawn = [random.choice(choices) for choices in places.values()]
    random.shuffle(drawn)
    return list(islice(filter(_compiles, drawn), number))


def _files() -> list[str]:
    found = [str(path.relative_to(SOURCE)) for part in ("plan", "execute") for path in (SOURCE / part).rglob("*.py")]
    return sorted(file for file in found if file not in NEED_GPU)


def _mutants(file: str) -> Iterator[Mutant]:
    code = (SOURCE / file).read_text()
    nodes, left_out = list(ast_nodes(get_ast(code))), _left_out(code)
    decorators = {line for line, text in enumerate(code.splitlines(), 1) if text.strip().startswith("@")}
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments() or name.endswith(SAME_MEANING):
            continue
        positions = [start for node in nodes for start, _ in kind().mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            if name.endswith("RemoveDecorator"):
                if code.splitlines()[line - 1].strip().lstrip("@").partition("(")[0] in NOT_RUN:
                    continue
            elif line in decorators:  # options of dataclasses
                continue
            if any(begin <= (line, column) < end for begin, end in left_out):
                continue
            yield Mutant(file=file, operator=name, occurrence=occurrence, line=line, column=column)


def _compiles(mutant: Mutant) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(mutated(mutant))
    except (SyntaxError, AttributeError):  # some operators fail on some code
        return False
    return True


def _left_out(code: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Nodes that never run: annotations, __all__ and imports for types only."""
    spans = []
    for node in ast.walk(ast.parse(code)):
        parts: list[ast.stmt | ast.expr | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        if isinstance(node, ast.FunctionDef):
            parts.append(node.returns)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts.append(node)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            parts.append(node)
        spans += [
            ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
            for part in parts
            if part is not None and part.end_lineno is not None and part.end_col_offset is not None
        ]
    return spans
