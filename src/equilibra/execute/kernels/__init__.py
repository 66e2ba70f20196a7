"""Operands and launches of the Triton kernels: grouped products over instances' rows, and rows to tokens and back.

Symbols: N rows, D width, F inner width. Without a GPU or Triton, torch operations compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Activation(StrEnum):
    """Activation between an expert's two matrices."""

    SWIGLU = "swiglu"
    """silu(gate) * up; gate is the first half of the columns"""
    CLAMPED_SWIGLU = "clamped-swiglu"
    """gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7"""


class ExpertParts(NamedTuple):
    """Parameters of one instance, or their gradients."""

    gate_up: Tensor
    """[2F, D]"""
    down: Tensor
    """[D, F]"""
    gate_up_bias: Tensor | None = None
    """[2F]"""
    down_bias: Tensor | None = None
    """[D]"""


class ExpertGradients(NamedTuple):
    """Gradient buffers of one instance; None for parts that are not trained."""

    gate_up: Tensor | None = None
    """[2F, D]"""
    down: Tensor | None = None
    """[D, F]"""
    gate_up_bias: Tensor | None = None
    """[2F]"""
    down_bias: Tensor | None = None
    """[D]"""


class RowWeights(NamedTuple):
    """Weights that combine applies to rows' results, and the buffer for their gradients."""

    values_N: Tensor
    """float32 or wider"""
    gradients_N: Tensor


KNOWN = (torch.bfloat16, torch.float16, torch.float32)

INTERPRETED = 3
"""programs when kernels are interpreted"""


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; INTERPRETED without one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else INTERPRETED


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **constants: Any) -> None:  # noqa: ANN401
    """Launch a Triton kernel on a tensor's device; Triton itself uses the current one."""
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **constants)


class Upload:
    """Numbers copied on a side stream without blocking the host; the first stream to read them waits, later ones must
    be ordered after it.
    """

    def __init__(self, numbers: NDArray[np.integer], device: torch.device) -> None:
        host = torch.from_numpy(numbers.astype(np.int32))
        self._values, self._arrived = host, None
        if device.type == "cuda":
            self._values = torch.empty_like(host, device=device)
            side = _side_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))  # earlier users of this memory may still run
            with torch.cuda.stream(side):
                self._values.copy_(host.pin_memory(), non_blocking=True)
            self._values.record_stream(side)  # if never read, nothing else orders the two streams
            self._arrived = side.record_event()

    @property
    def values(self) -> Tensor:
        """int32, valid on the current stream."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:  # once: in a later graph capture it would be an outside event
            torch.cuda.current_stream(self._values.device).wait_event(arrived)
        return self._values


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
