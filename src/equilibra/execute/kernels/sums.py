"""Gradients of copies, added as a Triton kernel: what they are added to is read and written once for all of them.

A small block on every multiprocessor: they run beside products, whose blocks must find room when they start.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from equilibra.execute.kernels import launch, multiprocessors

__all__ = ["add_in_order"]

MOST = 4
"""rows of a launch"""
BLOCK, WARPS = 2048, 4


def add_in_order(into: Tensor, rows: Sequence[Tensor]) -> None:
    """Add rows[0], then rows[1] and so on, to the bit; all contiguous, of one size and type."""
    count = into.numel()
    programs = min(-(-count // BLOCK), multiprocessors(into.device))
    for first in range(0, len(rows), MOST):
        some = rows[first : first + MOST]
        given = [*some, *[into] * (MOST - len(some))]
        launch(_add, (programs,), into, into, *given, count, NUM=len(some), BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _add(into, row0, row1, row2, row3, count, NUM: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < count
        total = tl.load(into + at, mask=mask) + tl.load(row0 + at, mask=mask)
        if NUM > 1:
            total += tl.load(row1 + at, mask=mask)
        if NUM > 2:
            total += tl.load(row2 + at, mask=mask)
        if NUM > 3:
            total += tl.load(row3 + at, mask=mask)
        tl.store(into + at, total, mask=mask)
