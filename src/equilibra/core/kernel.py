"""`kernel`: compile a function with numba, without the GIL, and cache the machine code on disk.

numba invalidates its cache by the function's own file only, so a kernel that calls another file's would keep running
old code after a change. So numba's stamp is replaced by a hash of all files of this package that have kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit

Function = Callable[..., Any]


@cache
def source_stamp() -> str:
    """Hash of the names and contents of all source files that have kernels."""
    package = Path(__file__).parents[1]
    state = sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        if b"equilibra.core.kernel" not in content:
            continue
        state.update(f"{file.relative_to(package)} {len(content)} ".encode())
        state.update(content)
    return state.hexdigest()


def kernel(function: Function) -> Function:
    """Compile on first use. Raises at import if numba no longer has the stamp that is replaced here."""
    try:
        compiled: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no writable cache folder: compile in every process
        return njit(nogil=True)(function)
    if hasattr(compiled, "_cache"):  # absent under NUMBA_DISABLE_JIT
        compiled._cache._cache_file._source_stamp = source_stamp()  # noqa: SLF001
    return compiled  # type: ignore[no-any-return]


def inlined(function: Function) -> Function:
    """Inline the function into every kernel that calls it: passing arrays costs more than a small function's work."""
    return njit(inline="always", nogil=True)(function)
