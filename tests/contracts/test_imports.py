"""No module of the package imports itself through others, however the imports are written.

import-linter checks layers of packages and skips what only a type checker reads; this counts every import statement:
at module level, inside functions, and under TYPE_CHECKING.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import equilibra

ROOT = Path(equilibra.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules named by the file's import statements; `from package import name` is the submodule if there is one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in inside}
    return (found & modules) - {module_name(path)}


def import_graph() -> dict[str, set[str]]:
    paths = sorted(ROOT.rglob("*.py"))
    modules = {module_name(path) for path in paths}
    return {module_name(path): imports_of(path, modules) for path in paths}


def test_no_import_cycle_counting_local_and_type_checking_imports():
    graph = import_graph()
    assert len(graph) > 100
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these modules import each other: {' -> '.join(reversed(error.args[1]))}") from None


def test_a_cycle_would_be_found():
    graph = import_graph()
    graph["equilibra.core.errors"] = {"equilibra.cli.main"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return
    raise AssertionError("a cycle was put in and not found")
