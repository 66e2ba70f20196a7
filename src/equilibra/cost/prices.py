"""Prices: what rows, tiles, copies, moves and links cost on one kind of hardware.

`presets` has lists by name and reads a user's own, written by `equilibra doctor` or `equilibra calibrate`. The
simulator reads a list directly; the planner reads what `rates.rates_for` derives from it for a model. Bandwidths are
per rank and direction.

The grouped matrix products of a rank's experts take, as measured,

    fixed + max(instances * expert bytes / weight rate,
                instances * expert bytes / instance rate + rows * (row bytes / row rate + FLOP / compute rate) * factor)

With few rows reading weights is the bottleneck; with many, the products, and one more instance costs its gradient and a
partly filled tile. Five constants per direction serve all shapes; a measured shape has its own factor around 1. The
curve is convex, so even ranks are never slower than uneven ones.

Causal attention takes 2 * width * s² FLOP for a sequence of s tokens, 2.5 times that backward (scores are recomputed);
matrix products take twice theirs. Dense parts take 2 FLOP per weight and token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel

MOST_ROWS = 2**31
"""limit on the rows a copy may cost or a tile hold; no rank computes as many"""
LEAST_RATE = 1e-9
ATTENTION_BACKWARD = 2.5
"""FLOP of attention's backward pass over those of its forward pass"""


@dataclass(frozen=True, kw_only=True)
class ExpertLaw:
    """Time of a rank's experts in one direction. A rate of 0 makes that part free."""

    fixed_us: float
    """launches and waits, independent of size"""
    weight_gb_per_s: float
    """reading weights of instances, where that is the bottleneck"""
    row_gb_per_s: float
    """activations of rows"""
    tflops: float
    """matrix products"""
    instance_gb_per_s: float = 0.0
    """weights of instances, where rows are the bottleneck: the cost of one more instance"""
    factor_of_shape: dict[str, float] = field(default_factory=dict)
    """measured over predicted time of rows, by shape "hidden x FFN" (such as "2048x768")"""

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
        """The law on a device with these multiples of the compute and memory rates."""
        rates = ("weight_gb_per_s", "row_gb_per_s", "instance_gb_per_s")
        return replace(self, tflops=self.tflops * compute, **{name: getattr(self, name) * memory for name in rates})

    def weights_us(self, model: MoEModel) -> float:
        """One more instance where weights are the bottleneck."""
        return model.expert_bytes * 1e-3 / self.weight_gb_per_s if self.weight_gb_per_s else 0.0

    def instance_us(self, model: MoEModel) -> float:
        """One more instance where rows are the bottleneck."""
        return model.expert_bytes * 1e-3 / self.instance_gb_per_s if self.instance_gb_per_s else 0.0

    def row_us(self, model: MoEModel, *, backward: bool) -> float:
        passes = 2 if backward else 1
        moved = row_bytes(model) * 1e-3 / self.row_gb_per_s if self.row_gb_per_s else 0.0
        multiplied = 2 * model.expert_parameters * 1e-6 / self.tflops if self.tflops else 0.0
        return passes * (moved + multiplied) * self.factor_of_shape.get(f"{model.hidden}x{model.expert_ffn}", 1.0)

    def time_us(self, model: MoEModel, *, rows: float, instances: float, backward: bool) -> float:
        """Time of a rank with these rows and instances."""
        products = rows * self.row_us(model, backward=backward)
        return self.fixed_us + max(instances * self.weights_us(model), instances * self.instance_us(model) + products)


@dataclass(frozen=True, kw_only=True)
class KernelPrices:
    """Cost of rows and copies in our kernels in the update, forward and backward together.

    A copy costs time in proportion to an expert's weights, about the same for all shapes. Unmeasured prices are 0.
    """

    tflops: float
    """products of a rank's rows"""
    hold_us_per_mb: float = 0.0
    """a copy on the rank that holds it: reading weights, writing the gradient"""
    serve_us_per_mb: float = 0.0
    """a copy on the rank it comes from"""
    move_beside_us_per_mb: float = 0.0
    """moving weights or a gradient during another layer, on the rank that holds the copy"""
    add_beside_us_per_mb: float = 0.0
    """adding a returned gradient during another layer, on the rank the copy came from"""
    tile_rows: int = 1
    """rows of an instance computed as one tile"""

    def __post_init__(self) -> None:
        check_whole("kernels: tile_rows", self.tile_rows, low=1, high=MOST_ROWS)
        for one in fields(self):
            if one.name != "tile_rows":
                least = LEAST_RATE if one.name == "tflops" else 0.0
                check_number(f"kernels: {one.name}", getattr(self, one.name), low=least, high=inf)

    def scaled(self, *, compute: float, memory: float) -> KernelPrices:
        us = {one.name: getattr(self, one.name) / memory for one in fields(self) if one.name.endswith("_us_per_mb")}
        return replace(self, tflops=self.tflops * compute, **us)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The price list of one kind of hardware."""

    name: str
    """lower case, as on the command line"""
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
    """device memory, for permuting rows and the optimizer"""
    nvlink_gb_per_s: float
    """inside a node"""
    nvlink_latency_us: float
    """one all-to-all inside a node"""
    nic_gb_per_s: float
    """across nodes"""
    nic_latency_us: float
    """one all-to-all across nodes"""
    host_link_gb_per_s: float
    """host memory to device"""
    copy_engine_gb_per_s: float
    """limit of the copy engines on any link"""
    copy_loss_gb_per_s: float
    """hidden copies slow compute by the time of their bytes at this rate, since both use device memory"""
    counts_us: float
    """exchange of counts and host synchronisation, where split sizes are not known ahead"""
    planner_cores: int
    """host cores per node used for planning"""
    cost_per_hour: float = 0.0
    """of a rank, in any one unit; 0: unknown"""
    kernels: KernelPrices | None = None
    """our kernels, if measured; None: a copy costs nothing besides its rows"""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "ranks_per_node", "planner_cores"):
            check_whole(f"hardware {self.name}: {name}", getattr(self, name), low=1, high=None)
        rates = [one.name for one in fields(self) if one.name.endswith(("_gb_per_s", "_tflops"))]
        for name in (*rates, "nvlink_latency_us", "nic_latency_us", "counts_us", "cost_per_hour"):
            least = LEAST_RATE if name in rates else 0.0
            check_number(f"hardware {self.name}: {name}", getattr(self, name), low=least, high=inf)

    @property
    def flash_gb_per_s(self) -> float:
        """Bandwidth of a flash copy inside the node."""
        return min(self.nvlink_gb_per_s, self.copy_engine_gb_per_s)

    def without_kernels(self) -> Prices:
        """The list without kernel prices: copies cost nothing besides their rows."""
        return replace(self, kernels=None)

    def scaled(self, *, compute: float, memory: float, **changes: object) -> Prices:
        """The list with compute and device memory rates multiplied and other fields replaced."""
        parts = {name: getattr(self, name) for name in ("experts_forward", "experts_backward", "kernels")}
        faster = {name: part and part.scaled(compute=compute, memory=memory) for name, part in parts.items()}
        for name in ("dense_tflops", "attention_tflops", "attention_backward_tflops"):
            faster[name] = getattr(self, name) * compute
        for name in ("hbm_gb_per_s", "copy_loss_gb_per_s"):
            faster[name] = getattr(self, name) * memory
        return replace(self, **{**faster, **changes})


def row_bytes(model: MoEModel) -> int:
    """Bytes of activations one row reads and writes forward: input, gate, up and output."""
    return (2 * model.hidden + 6 * model.expert_ffn) * model.weight_bytes
