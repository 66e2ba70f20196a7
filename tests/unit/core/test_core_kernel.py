"""A stale kernel is impossible: whatever changes in a file that a kernel is made of, it is compiled anew."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import equilibra
from equilibra.core import kernel

PACKAGE = Path(equilibra.__file__).parent

CALLED = "from equilibra.core.kernel import kernel\n\n\n@kernel\ndef called(x):\n    return x + {number}\n"
CALLER = (
    "from equilibra.core.kernel import kernel\nfrom equilibra.called import called\n\n\n"
    "@kernel\ndef caller(x):\n    return 10 * called(x)\n"
)


@pytest.fixture
def package(tmp_path):
    """A package with the real core.kernel, and a kernel that calls another one of another file."""
    root = tmp_path / "equilibra"
    (root / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py"):
        (root / name).write_text('"""."""\n')
    shutil.copy(PACKAGE / "core" / "kernel.py", root / "core" / "kernel.py")
    (root / "called.py").write_text(CALLED.format(number=1))
    (root / "caller.py").write_text(CALLER)
    return root


def run(package: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(package.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def result(package: Path) -> tuple[str, str]:
    code = (
        "from equilibra.caller import caller; from equilibra.core.kernel import source_stamp\n"
        "print(caller(0), sum(caller.stats.cache_hits.values())); print(source_stamp())"
    )
    answer, stamp = run(package, code).splitlines()
    return answer, stamp


def test_an_unchanged_kernel_comes_from_the_disk_and_a_changed_callee_compiles_its_caller(package):
    first, stamp = result(package)
    assert first == "10 0"
    again, same_stamp = result(package)
    assert again == "10 1", "the compiled caller should have been loaded"
    assert same_stamp == stamp
    (package / "called.py").write_text(CALLED.format(number=12))
    changed, other_stamp = result(package)
    assert changed == "120 0"
    assert other_stamp != stamp


def test_an_edit_that_keeps_size_and_time_is_seen(package):
    """As archives and installers with fixed times make them."""
    file = package / "called.py"
    assert result(package)[0] == "10 0"
    stat = file.stat()
    file.write_text(CALLED.format(number=2))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert result(package)[0] == "20 0"


def test_two_files_that_exchange_their_contents_are_seen(package):
    (package / "other.py").write_text(CALLED.format(number=7))
    stats = {name: (package / name).stat() for name in ("called.py", "other.py")}
    assert result(package)[0] == "10 0"
    first, second = (package / "called.py").read_text(), (package / "other.py").read_text()
    (package / "called.py").write_text(second)
    (package / "other.py").write_text(first)
    for name, other in (("called.py", "other.py"), ("other.py", "called.py")):
        os.utime(package / name, ns=(stats[other].st_atime_ns, stats[other].st_mtime_ns))
    assert result(package)[0] == "70 0"


def has_kernels(file: Path) -> bool:
    return b"equilibra.core.kernel" in file.read_bytes()


def test_kernels_are_made_only_of_files_that_the_stamp_covers():
    """What a kernel reads from another file (functions and constants) must be in a file whose changes are seen."""
    checked = 0
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        source_of_name = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equilibra"):
                for alias in node.names:
                    module = PACKAGE.parent / Path(*node.module.split("."))
                    inner = module / f"{alias.name}.py"  # from equilibra.plan import replicate
                    source_of_name[alias.asname or alias.name] = inner if inner.exists() else module.with_suffix(".py")
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not {"kernel", "inlined"} & {d.id for d in function.decorator_list if isinstance(d, ast.Name)}:
                continue
            assert has_kernels(file), f"the stamp does not cover {file}, which has kernels"
            used = {n.id for line in function.body for n in ast.walk(line) if isinstance(n, ast.Name)}
            for name in used & set(source_of_name):
                checked += 1
                assert has_kernels(source_of_name[name]), f"{file.name}: a kernel uses {name} of an uncovered file"
    assert checked > 10


def test_a_kernel_keeps_no_gil_and_is_cached():
    @kernel.kernel
    def twice(x):
        return 2 * x

    assert twice.targetoptions["nogil"]
    assert twice._cache._cache_file._source_stamp == kernel.source_stamp()
