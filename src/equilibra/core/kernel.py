"""`kernel`: compile a function with numba, without the GIL, and cache the machine code on disk.

numba invalidates its cache by the function's own file only. A kernel that calls one from another file would keep
running that one's old code after a change, and a stale planner makes wrong plans. So numba's stamp is replaced by a
hash of all files of this package that have kernels: a change to any of them recompiles all of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from numba import njit

__all__ = ["inlined", "kernel", "source_stamp"]

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
        return _uncached(function, "never")
    if hasattr(compiled, "_cache"):  # absent under NUMBA_DISABLE_JIT
        compiled._cache._cache_file._source_stamp = source_stamp()  # noqa: SLF001
    function_compiled: Function = compiled
    return function_compiled


def inlined(function: Function) -> Function:
    """Inline the function into every kernel that calls it: passing arrays costs more than a small function's work."""
    return _uncached(function, "always")


def _uncached(function: Function, inline: Literal["always", "never"]) -> Function:
    compiled: Function = njit(inline=inline, nogil=True)(function)
    return compiled
