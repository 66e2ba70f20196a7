"""Triton kernels: grouped products over instances' rows, and rows to tokens and back.

Without a GPU or Triton, torch operations compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from equilibra.execute.kernels.device import has_triton, launch, multiprocessors

__all__ = ["add_in_order", "has_triton", "launch", "multiprocessors", "on_gpu", "row_kernels"]

KNOWN = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(rows_ND: Tensor) -> bool:
    """Whether kernels support these rows; they accumulate in float32, so not float64."""
    return rows_ND.is_cuda and rows_ND.dtype in KNOWN and has_triton()


def row_kernels() -> ModuleType:
    """The module of kernels over rows, which needs Triton."""
    return import_module("equilibra.execute.kernels.rows")


def add_in_order(into: Tensor, rows: Sequence[Tensor]) -> None:
    """Add rows[0], rows[1], ... in this order."""
    if on_gpu(into) and all(row.is_contiguous() and row.dtype == into.dtype for row in (into, *rows)):
        row_kernels().add_in_order(into, rows)
    else:
        for row in rows:
            into += row
