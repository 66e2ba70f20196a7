"""Triton kernels for GPUs: products over rows grouped by instance, and rows to tokens and back.

Where there is no GPU, or no Triton, nothing here is used, and torch's own operations compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["add_in_order", "has_triton", "multiprocessors", "on_gpu", "spread", "weighed_gradient", "weighed_sum"]

KNOWN = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = 3
"""programs where there is no GPU"""


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled."""
    return find_spec("triton") is not None


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few where kernels are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else INTERPRETED


def on_gpu(rows_ND: Tensor) -> bool:
    """Whether kernels serve such rows; sums are in float32, so float64 is not theirs."""
    return rows_ND.is_cuda and rows_ND.dtype in KNOWN and has_triton()


def add_in_order(into: Tensor, rows: Sequence[Tensor]) -> None:
    """Add rows[0], then rows[1] and so on."""
    if on_gpu(into) and all(row.is_contiguous() and row.dtype == into.dtype for row in (into, *rows)):
        from equilibra.execute.kernels import sums  # noqa: PLC0415 - needs Triton

        sums.add_in_order(into, rows)
    else:
        for row in rows:
            into += row


def spread(tokens_TD: Tensor, row_of_pair_TK: Tensor) -> Tensor:
    """[T * K, D] every token once for each of its choices: each is read once."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415

    return rows.spread(tokens_TD, row_of_pair_TK)


def weighed_sum(rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, D] each token's rows, summed in the order of its choices, weighed if there are weights."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415 - needs Triton

    return rows.weighed_sum(rows_ND, row_of_pair_TK, weights_TK)


def weighed_gradient(
    dout_TD: Tensor, rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, D] and of weights [T, K]."""
    from equilibra.execute.kernels import rows  # noqa: PLC0415

    return rows.weighed_gradient(dout_TD, rows_ND, row_of_pair_TK, weights_TK)
