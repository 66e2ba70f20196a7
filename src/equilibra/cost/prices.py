"""Prices: what rows, tiles, copies, moves and links cost on one kind of hardware. One list for everybody.

`presets` has lists by name, with their sources; `files` reads a user's own, which `equilibra doctor` and `equilibra
calibrate` write. The simulator takes times from a list as it stands; the planner takes what `rates.rates_for` derives
from it for a model. Bandwidths are per rank and direction.

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

from dataclasses import dataclass, field, fields, replace
from math import inf

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel

__all__ = ["ATTENTION_BACKWARD", "MOST_ROWS", "ExpertLaw", "KernelPrices", "Prices", "row_bytes"]

MOST_ROWS = 2**31
"""that a copy may cost, or a tile hold: no rank computes as many"""
LEAST_RATE = 1e-9
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
            check_number(name, getattr(self, name), high=inf)
        factors = self.factor_of_shape
        if not isinstance(factors, dict) or not all(
            isinstance(value, (int, float)) and 0.1 < value < 10 for value in factors.values()
        ):
            raise InputError(f"factor_of_shape must be a table of numbers from 0.1 to 10, not {factors}")
        if self.row_gb_per_s == 0 and self.tflops == 0:
            raise InputError("rows must cost something: row_gb_per_s or tflops must be above 0")

    def scaled(self, *, compute: float, memory: float) -> ExpertLaw:
        """On a device with so many times the compute and memory rates."""
        rates = ("weight_gb_per_s", "row_gb_per_s", "instance_gb_per_s")
        return replace(self, tflops=self.tflops * compute, **{name: getattr(self, name) * memory for name in rates})

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


@dataclass(frozen=True, kw_only=True)
class KernelPrices:
    """What rows and copies cost in the update in our kernels, forward and backward together.

    Copies cost time in proportion to the size of an expert's weights, about the same for all shapes. What was not
    measured is 0: it costs nothing.
    """

    tflops: float
    """products of a rank's rows"""
    hold_us_per_mb: float = 0.0
    """a copy, to the rank that holds it: its weights are read and its gradient written"""
    serve_us_per_mb: float = 0.0
    """a copy, to the rank it comes from"""
    move_beside_us_per_mb: float = 0.0
    """weights or a gradient that move beside another layer, to the rank that holds the copy"""
    add_beside_us_per_mb: float = 0.0
    """a returned gradient that is added beside another layer, to the rank that the copy came from"""
    tile_rows: int = 1
    """rows of an instance that are computed together"""

    def __post_init__(self) -> None:
        check_whole("kernels: tile_rows", self.tile_rows, low=1, high=MOST_ROWS)
        for one in fields(self):
            if one.name != "tile_rows":
                least = LEAST_RATE if one.name == "tflops" else 0.0
                check_number(f"kernels: {one.name}", getattr(self, one.name), low=least, high=inf)

    def scaled(self, *, compute: float, memory: float) -> KernelPrices:
        """On a device with so many times the compute and memory rates: copies are reads and writes of memory."""
        us = {one.name: getattr(self, one.name) / memory for one in fields(self) if one.name.endswith("_us_per_mb")}
        return replace(self, tflops=self.tflops * compute, **us)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What one kind of hardware costs."""

    name: str
    """lower case, as in the command line"""
    source: str
    """where the figures come from"""
    memory_bytes: int
    """device memory of a rank"""
    ranks_per_node: int
    """ranks that share fast links"""
    experts_forward: ExpertLaw
    """grouped matrix products, forward"""
    experts_backward: ExpertLaw
    """the same, backward"""
    dense_tflops: float
    """large matrix products"""
    attention_tflops: float
    """attention kernel, forward"""
    attention_backward_tflops: float
    """the same, backward"""
    hbm_gb_per_s: float
    """device memory, for what only moves bytes: permuting rows, the optimizer"""
    nvlink_gb_per_s: float
    """inside a node"""
    nvlink_latency_us: float
    """of one all-to-all inside a node"""
    nic_gb_per_s: float
    """across nodes"""
    nic_latency_us: float
    """of one all-to-all across nodes"""
    host_link_gb_per_s: float
    """host memory to device"""
    copy_engine_gb_per_s: float
    """what copy engines move at most, whatever the link"""
    copy_loss_gb_per_s: float
    """hidden copies slow compute by the time their bytes take at this rate: both use the device's memory"""
    counts_us: float
    """exchange of counts and waiting for the host to read them, where split sizes are not known ahead"""
    planner_cores: int
    """host processors per node that plan"""
    kernels: KernelPrices | None = None
    """our kernels, where they were measured; None: a copy costs no rank anything besides its rows"""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "ranks_per_node", "planner_cores"):
            check_whole(f"hardware {self.name}: {name}", getattr(self, name), low=1, high=None)
        rates = [one.name for one in fields(self) if one.name.endswith(("_gb_per_s", "_tflops"))]
        for name in (*rates, "nvlink_latency_us", "nic_latency_us", "counts_us"):
            least = LEAST_RATE if name in rates else 0.0
            check_number(f"hardware {self.name}: {name}", getattr(self, name), low=least, high=inf)

    @property
    def flash_gb_per_s(self) -> float:
        """What a flash copy gets inside the node."""
        return min(self.nvlink_gb_per_s, self.copy_engine_gb_per_s)

    def without_kernels(self) -> Prices:
        """The list by which copies cost no rank anything besides their rows."""
        return replace(self, kernels=None)

    def scaled(self, *, compute: float, memory: float, **changes: object) -> Prices:
        """The machine with compute and device memory so many times as fast, and other fields replaced."""
        parts = {name: getattr(self, name) for name in ("experts_forward", "experts_backward", "kernels")}
        faster = {name: part and part.scaled(compute=compute, memory=memory) for name, part in parts.items()}
        for name in ("dense_tflops", "attention_tflops", "attention_backward_tflops"):
            faster[name] = getattr(self, name) * compute
        for name in ("hbm_gb_per_s", "copy_loss_gb_per_s"):
            faster[name] = getattr(self, name) * memory
        return replace(self, **{**faster, **changes})


def row_bytes(model: MoEModel) -> int:
    """Activations that one row reads and writes forward: its input, both halves of the first product, and output."""
    return (2 * model.hidden + 6 * model.expert_ffn) * model.weight_bytes
