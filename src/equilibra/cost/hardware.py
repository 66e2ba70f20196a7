"""Hardware: what a rank and its links can do. `presets` has some, with their sources; a user's own is a small file.

Bandwidths are per rank and direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from equilibra.core.errors import InputError
from equilibra.cost.compute import ExpertLaw

__all__ = ["Hardware"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of machine."""

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

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "ranks_per_node", "planner_cores"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"hardware {self.name}: {name} must be a whole number above 0, not {value!r}")
        rates = [name for name in self.__dataclass_fields__ if name.endswith(("_gb_per_s", "_tflops"))]
        for name in (*rates, "nvlink_latency_us", "nic_latency_us", "counts_us"):
            value = getattr(self, name)
            least = 1e-9 if name in rates else 0
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or value < least:
                raise InputError(f"hardware {self.name}: {name} must be a number from {least} on, not {value!r}")

    @property
    def flash_gb_per_s(self) -> float:
        """What a flash copy gets inside the node."""
        return min(self.nvlink_gb_per_s, self.copy_engine_gb_per_s)

    def scaled(self, *, compute: float, memory: float, **changes: object) -> Hardware:
        """The machine with compute and device memory so many times as fast, and other fields replaced."""

        def law(of: ExpertLaw) -> ExpertLaw:
            return replace(
                of,
                weight_gb_per_s=of.weight_gb_per_s * memory,
                row_gb_per_s=of.row_gb_per_s * memory,
                tflops=of.tflops * compute,
                instance_gb_per_s=of.instance_gb_per_s * memory,
            )

        faster: dict[str, object] = {
            "experts_forward": law(self.experts_forward),
            "experts_backward": law(self.experts_backward),
            "dense_tflops": self.dense_tflops * compute,
            "attention_tflops": self.attention_tflops * compute,
            "attention_backward_tflops": self.attention_backward_tflops * compute,
            "hbm_gb_per_s": self.hbm_gb_per_s * memory,
            "copy_loss_gb_per_s": self.copy_loss_gb_per_s * memory,
        }
        return replace(self, **{**faster, **changes})  # type: ignore[arg-type]
