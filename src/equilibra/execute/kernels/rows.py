"""Rows to tokens and back, as Triton kernels: each row is read or written once.

Symbols: T tokens, K experts per token, N rows, D width.

    spread             rows[row_of_pair[t, k]] = tokens[t]
    weighed_sum        out[t] = sum over k of w[t, k] rows[row_of_pair[t, k]], in the order of choices
    weighed_gradient   drows[row_of_pair[t, k]] = w[t, k] dout[t], dw[t, k] = rows[row_of_pair[t, k]] . dout[t]

Sums are taken in float32. A program has one token.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["spread", "weighed_gradient", "weighed_sum"]


def spread(tokens_TD: Tensor, row_of_pair_TK: Tensor) -> Tensor:
    """[T * K, D] every token once for each of its choices."""
    (num_tokens, top_k), width = row_of_pair_TK.shape, tokens_TD.shape[1]
    rows_ND = tokens_TD.new_empty(num_tokens * top_k, width)
    if num_tokens:
        _spread[(num_tokens,)](
            tokens_TD.contiguous(), row_of_pair_TK, rows_ND, K=top_k, D=width, BLOCK=triton.next_power_of_2(width),
            num_warps=_warps(width),
        )  # fmt: skip
    return rows_ND


def weighed_sum(rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, D] each token's rows, weighed if there are weights."""
    (num_tokens, top_k), width = row_of_pair_TK.shape, rows_ND.shape[1]
    out_TD = rows_ND.new_empty(num_tokens, width)
    if num_tokens:
        _weighed_sum[(num_tokens,)](
            rows_ND, row_of_pair_TK, rows_ND if weights_TK is None else weights_TK.contiguous(), out_TD,
            K=top_k, D=width, WEIGHED=weights_TK is not None, BLOCK=triton.next_power_of_2(width),
            num_warps=_warps(width),
        )  # fmt: skip
    return out_TD


def weighed_gradient(
    dout_TD: Tensor, rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, D] and weights [T, K]."""
    (num_tokens, top_k), width = row_of_pair_TK.shape, rows_ND.shape[1]
    drows_ND, dweights_TK = torch.empty_like(rows_ND), weights_TK.new_empty(num_tokens, top_k)
    if num_tokens:
        _weighed_gradient[(num_tokens,)](
            dout_TD.contiguous(), rows_ND, row_of_pair_TK, weights_TK.contiguous(), drows_ND, dweights_TK,
            K=top_k, D=width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip
    return drows_ND, dweights_TK


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit(do_not_specialize_on_alignment=["row_of_pair"])
def _spread(tokens, row_of_pair, rows, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    values = tl.load(tokens + t * D + cols, mask=cols < D)
    for k in range(K):
        row = tl.load(row_of_pair + t * K + k).to(tl.int64)
        tl.store(rows + row * D + cols, values, mask=cols < D)


@triton.jit(do_not_specialize_on_alignment=["row_of_pair", "weights"])
def _weighed_sum(
    rows, row_of_pair, weights, out, K: tl.constexpr, D: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        row = tl.load(row_of_pair + t * K + k).to(tl.int64)
        values = tl.load(rows + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        if WEIGHED:
            values *= tl.load(weights + t * K + k).to(tl.float32)
        total += values
    tl.store(out + t * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


@triton.jit(do_not_specialize_on_alignment=["row_of_pair", "weights", "dweights"])
def _weighed_gradient(
    dout, rows, row_of_pair, weights, drows, dweights, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    gradient = tl.load(dout + t * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    for k in range(K):
        row = tl.load(row_of_pair + t * K + k).to(tl.int64)
        values = tl.load(rows + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        tl.store(dweights + t * K + k, tl.sum(values * gradient, axis=0).to(dweights.dtype.element_ty))
        weight = tl.load(weights + t * K + k).to(tl.float32)
        tl.store(drows + row * D + cols, (gradient * weight).to(drows.dtype.element_ty), mask=cols < D)
