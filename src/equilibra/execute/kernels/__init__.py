"""Triton kernels: grouped products over instances' rows, and rows to tokens and back.

Without a GPU or Triton, torch operations compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibra.execute.kernels.device import has_triton, launch, multiprocessors

__all__ = ["add_in_order", "has_triton", "launch", "multiprocessors", "on_gpu", "plain_sum", "spread", "weighted_sum"]

KNOWN = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(rows_ND: Tensor) -> bool:
    """Whether kernels support these rows; they accumulate in float32, so not float64."""
    return rows_ND.is_cuda and rows_ND.dtype in KNOWN and has_triton()


def add_in_order(into: Tensor, rows: Sequence[Tensor]) -> None:
    """Add rows[0], rows[1], ... in this order."""
    if on_gpu(into) and all(row.is_contiguous() and row.dtype == into.dtype for row in (into, *rows)):
        from equilibra.execute.kernels import rows as triton_rows  # noqa: PLC0415 - needs Triton

        triton_rows.add_in_order(into, rows)
    else:
        for row in rows:
            into += row


def spread(
    tokens_TD: Tensor, row_of_pair_TK: Tensor, rows_ND: Tensor, pairs_TK: Tensor | None = None,
    numbers_N: Tensor | None = None,
) -> None:  # fmt: skip
    """Write every token once per choice, and the rows' numbers from those of pairs."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415 - needs Triton

    rows.spread(tokens_TD, row_of_pair_TK, rows_ND, pairs_TK, numbers_N)


def weighted_sum(rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D] each token's rows, weighted and summed in the order of its choices."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415

    return rows.weighted_sum(rows_ND, row_of_pair_TK, weights_TK)


def plain_sum(
    rows_ND: Tensor, row_of_pair_TK: Tensor, numbers_N: Tensor | None = None, pairs_TK: Tensor | None = None
) -> Tensor:
    """[T, D] each token's rows, summed in the order of its choices; numbers of pairs are written from rows'."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415

    return rows.plain_sum(rows_ND, row_of_pair_TK, numbers_N, pairs_TK)
