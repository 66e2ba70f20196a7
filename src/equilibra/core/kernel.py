"""`kernel`: compile a function with numba, free of the GIL, and keep the machine code on disk.

numba's cache looks only at the file of the function itself. A kernel that calls another one from another file would
go on running the old code of that one after it changed, and a stale planner makes wrong plans. So the stamp that
numba compares is replaced by one over all files of this package that have kernels: a change to any of them compiles
all of them anew, once.
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
    """A hash of the name and content of every source file that has kernels: no edit of them keeps it."""
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
    """Compile on first use; raises at import if numba no longer has the stamp that is replaced here."""
    try:
        compiled: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to write to: compile in every process
        return _uncached(function, "never")
    if hasattr(compiled, "_cache"):  # not under NUMBA_DISABLE_JIT
        compiled._cache._cache_file._source_stamp = source_stamp()  # noqa: SLF001
    function_compiled: Function = compiled
    return function_compiled


def inlined(function: Function) -> Function:
    """Compile into every kernel that calls it: a call that passes arrays costs more than a small function does."""
    return _uncached(function, "always")


def _uncached(function: Function, inline: Literal["always", "never"]) -> Function:
    """Compile without keeping the machine code."""
    compiled: Function = njit(inline=inline, nogil=True)(function)
    return compiled
