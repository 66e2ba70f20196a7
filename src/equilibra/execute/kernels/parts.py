"""What experts are computed from: an instance's parameters, their gradients, weights of rows, the activation.

Symbols: N rows, D width, F inner width.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

__all__ = ["Activation", "ExpertGradients", "ExpertParts", "RowWeights"]


class Activation(StrEnum):
    """Between the two matrices of an expert."""

    SWIGLU = "swiglu"
    """silu(gate) * up; the first half of the columns is gate, the second up"""
    CLAMPED_SWIGLU = "clamped-swiglu"
    """gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7"""


class ExpertParts(NamedTuple):
    """Parameters of one instance, or gradients of them."""

    gate_up: Tensor
    """[2F, D]"""
    down: Tensor
    """[D, F]"""
    gate_up_bias: Tensor | None = None
    """[2F]"""
    down_bias: Tensor | None = None
    """[D]"""

    @classmethod
    def named(cls, parts: dict[str, Tensor]) -> ExpertParts:
        """From parts by name."""
        return cls(**parts)


class ExpertGradients(NamedTuple):
    """Where gradients of one instance are added; None for parts that do not learn."""

    gate_up: Tensor | None = None
    """[2F, D]"""
    down: Tensor | None = None
    """[D, F]"""
    gate_up_bias: Tensor | None = None
    """[2F]"""
    down_bias: Tensor | None = None
    """[D]"""


class RowWeights(NamedTuple):
    """What results of rows are weighted with, by whoever sums them."""

    values_N: Tensor
    """float32, or more"""
    gradients_N: Tensor
    """where their gradients are written"""
