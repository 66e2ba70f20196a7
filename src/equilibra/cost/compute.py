"""Compute: how long a rank takes for its experts, its attention and its dense parts.

Experts, as measured: the grouped matrix products of a rank take

    fixed + max(instances * expert bytes / weight rate,
                instances * expert bytes / instance rate + rows * (row bytes / row rate + FLOP / compute rate) * factor)

Few rows wait for the weights of all instances, many rows for the products; there one instance more costs its gradient
and a last tile that its rows fill only partly, and nothing hides that. One set of five constants per direction serves
all shapes, because bytes and FLOP follow from hidden and FFN width: a small expert is slower per FLOP since its
rows move as many bytes for less work. A shape that was measured has a factor of its own around 1. `calibrate` fits all
of it. The curve is convex and rises with rows and instances, so even ranks are never slower than uneven ones.

Attention takes 2 * width * s² FLOP for a sequence of s tokens (causal), backward 2.5 times that (scores are computed
anew); matrix products take twice. Dense parts take 2 FLOP per weight and token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel

__all__ = ["ATTENTION_BACKWARD", "ExpertLaw", "row_bytes"]

ATTENTION_BACKWARD = 2.5
"""FLOP of attention's backward pass over those of its forward pass"""


@dataclass(frozen=True, kw_only=True)
class ExpertLaw:
    """Time of a rank's experts in one direction. A rate of 0 means that this part costs nothing."""

    fixed_us: float
    """launches and waits, whatever the size"""
    weight_gb_per_s: float
    """weights of instances, where these are waited for"""
    row_gb_per_s: float
    """activations of rows"""
    tflops: float
    """matrix products"""
    instance_gb_per_s: float = 0.0
    """weights of instances once more, where rows are waited for: what an instance costs that has few rows"""
    factor_of_shape: dict[str, float] = field(default_factory=dict)
    """by "hidden x FFN" (as "2048x768"): how much longer its rows take than the law says, where it was measured"""

    def __post_init__(self) -> None:
        for name in ("fixed_us", "weight_gb_per_s", "row_gb_per_s", "tflops", "instance_gb_per_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or value < 0:
                raise InputError(f"{name} must be a number from 0 on, not {value!r}")
        factors = self.factor_of_shape
        if not isinstance(factors, dict) or not all(
            isinstance(value, (int, float)) and 0.1 < value < 10 for value in factors.values()
        ):
            raise InputError(f"factor_of_shape must be a table of numbers from 0.1 to 10, not {factors}")
        if self.row_gb_per_s == 0 and self.tflops == 0:
            raise InputError("rows must cost something: row_gb_per_s or tflops must be above 0")

    def weights_us(self, model: MoEModel) -> float:
        """One instance more on a rank that waits for weights."""
        return model.expert_bytes * 1e-3 / self.weight_gb_per_s if self.weight_gb_per_s else 0.0

    def instance_us(self, model: MoEModel) -> float:
        """One instance more on a rank that waits for its rows."""
        return model.expert_bytes * 1e-3 / self.instance_gb_per_s if self.instance_gb_per_s else 0.0

    def row_us(self, model: MoEModel, *, backward: bool) -> float:
        """One row more on the rank."""
        passes = 2 if backward else 1
        moved = row_bytes(model) * 1e-3 / self.row_gb_per_s if self.row_gb_per_s else 0.0
        multiplied = 2 * model.expert_parameters * 1e-6 / self.tflops if self.tflops else 0.0
        return passes * (moved + multiplied) * self.factor_of_shape.get(f"{model.hidden}x{model.expert_ffn}", 1.0)

    def time_us(self, model: MoEModel, *, rows: float, instances: float, backward: bool) -> float:
        """Time of a rank with so many rows and instances."""
        products = rows * self.row_us(model, backward=backward)
        return self.fixed_us + max(instances * self.weights_us(model), instances * self.instance_us(model) + products)


def row_bytes(model: MoEModel) -> int:
    """Activations that one row reads and writes forward: its input, both halves of the first product, and output."""
    return (2 * model.hidden + 6 * model.expert_ffn) * model.weight_bytes
