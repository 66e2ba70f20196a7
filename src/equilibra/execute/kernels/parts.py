"""Operands of expert kernels: an instance's parameters and gradients, row weights, the activation.

Symbols: N rows, D width, F inner width.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

__all__ = ["Activation", "ExpertGradients", "ExpertParts", "RowWeights"]


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
