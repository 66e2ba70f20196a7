"""Rows to tokens and back, as Triton kernels: each row is read or written once.

Symbols: T tokens, K experts per token, N rows, D width.

    spread         rows[row_of_pair[t, k]] = tokens[t], and the numbers of pairs to rows
    weighted_sum   out[t] = sum over k of w[t, k] rows[row_of_pair[t, k]], in the order of choices, in float32
    plain_sum      the same without weights, and the numbers of rows back to pairs

A program has one token. Rows and their numbers may be strided.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from equilibra.execute.kernels import launch, multiprocessors


def spread(
    tokens_TD: Tensor, row_of_pair_TK: Tensor, rows_ND: Tensor, pairs_TK: Tensor | None = None,
    numbers_N: Tensor | None = None,
) -> None:  # fmt: skip
    """Write every token once for each of its choices, and the numbers of rows from those of pairs."""
    (num_tokens, top_k), width = row_of_pair_TK.shape, tokens_TD.shape[1]
    if num_tokens:
        launch(
            _spread, (num_tokens,), rows_ND,
            tokens_TD.contiguous(), row_of_pair_TK, *_numbers(rows_ND, numbers_N, pairs_TK), rows_ND,
            K=top_k, D=width, STRIDE=rows_ND.stride(0), NUMBERED=pairs_TK is not None,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip


def weighted_sum(rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D] each token's rows, weighted."""
    out_TD = rows_ND.new_empty(len(row_of_pair_TK), rows_ND.shape[1])
    _launch_sum(rows_ND, row_of_pair_TK, (rows_ND, 1, weights_TK.contiguous()), out_TD, weighted=True, numbered=False)
    return out_TD


def plain_sum(
    rows_ND: Tensor, row_of_pair_TK: Tensor, numbers_N: Tensor | None = None, pairs_TK: Tensor | None = None
) -> Tensor:
    """[T, D] each token's rows; write numbers of pairs from those of rows."""
    out_TD = rows_ND.new_empty(len(row_of_pair_TK), rows_ND.shape[1])
    numbers = _numbers(rows_ND, numbers_N, pairs_TK)
    _launch_sum(rows_ND, row_of_pair_TK, numbers, out_TD, weighted=False, numbered=pairs_TK is not None)
    return out_TD


def _numbers(rows_ND: Tensor, numbers_N: Tensor | None, pairs_TK: Tensor | None) -> tuple[Tensor, int, Tensor]:
    """Numbers of rows with their stride, and numbers of pairs; placeholders where there are none."""
    if numbers_N is None or pairs_TK is None:
        return rows_ND, 1, rows_ND
    return numbers_N, numbers_N.stride(0), pairs_TK


def _launch_sum(
    rows_ND: Tensor, row_of_pair_TK: Tensor, numbers: tuple[Tensor, int, Tensor], out_TD: Tensor, *, weighted: bool,
    numbered: bool,
) -> None:  # fmt: skip
    (num_tokens, top_k), width = row_of_pair_TK.shape, rows_ND.shape[1]
    if num_tokens:
        launch(
            _sum, (num_tokens,), rows_ND,
            rows_ND, row_of_pair_TK, *numbers, out_TD, K=top_k, D=width, STRIDE=rows_ND.stride(0), WEIGHTED=weighted,
            NUMBERED=numbered, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit(do_not_specialize_on_alignment=["row_of_pair", "numbers", "pairs"])
def _spread(
    tokens, row_of_pair, numbers, apart, pairs, rows,
    K: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, NUMBERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    values = tl.load(tokens + t * D + cols, mask=cols < D)
    for k in range(K):
        row = tl.load(row_of_pair + t * K + k).to(tl.int64)
        tl.store(rows + row * STRIDE + cols, values, mask=cols < D)
        if NUMBERED:
            tl.store(numbers + row * apart, tl.load(pairs + t * K + k).to(numbers.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["row_of_pair", "numbers", "pairs"])
def _sum(
    rows, row_of_pair, numbers, apart, pairs, out,
    K: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, NUMBERED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs: weights that are read if WEIGHTED, numbers that are written if NUMBERED."""
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        row = tl.load(row_of_pair + t * K + k).to(tl.int64)
        values = tl.load(rows + row * STRIDE + cols, mask=cols < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(pairs + t * K + k).to(tl.float32)
        if NUMBERED:
            tl.store(pairs + t * K + k, tl.load(numbers + row * apart).to(pairs.dtype.element_ty))
        total += values
    tl.store(out + t * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


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
