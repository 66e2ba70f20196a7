"""What the GPU bench runs: how much of which recordings, under which shapes, on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from equilibra.core.errors import InputError

__all__ = ["MODELS", "PATHS", "RANKS", "RECORDINGS", "GpuSetting"]

RECORDINGS = {"gpt-oss-20b": ("gpt-oss-20b",), "dsv2-lite": ("dsv2-lite-law", "dsv2-lite-intent")}
"""recordings that are taken if nobody names one, each from one file or several, joined"""
MODELS = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
"""whose hidden and FFN width are taken if nobody names one"""
RANKS = (8, 16, 32)
PATHS = ("device", "host")
"""where copies come from: another place of the device's memory, or pinned memory of the host"""
MOST = 1 << 20
"""of any number: more is a slip of the hand"""


@dataclass(frozen=True, kw_only=True)
class GpuSetting:
    """What is the same in all cases."""

    tokens_per_rank: int = 4096
    """tokens of a micro-batch, per rank"""
    layers: int = 2
    """MoE layers, evenly spread over the model; the next of them is the one whose copies move"""
    micro_batches: int = 2
    """of the step that is planned, evenly spread over the recording"""
    repeats: int = 5
    """timed rounds of all contenders, after one that does not count"""
    spare_slots: int = 2
    """flash copies a rank can hold"""
    standing_slots: int = 2
    """standing copies a node can hold per layer"""
    ranks_per_node: int = 8
    """ranks that share fast links; fewer ranks are one node"""
    paths: tuple[str, ...] = PATHS
    """of flash copies; the first is the one that counts"""
    network: bool = False
    """whether plans count traffic across nodes, as on a cluster; nothing here runs it"""
    seconds: int | None = None
    """for all cases together: each stops after a layer and micro-batch when its part is used up"""
    seed: int = 0
    """of weights and rows"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("seed", "spare_slots", "standing_slots") else 1
            if field.name not in ("paths", "network") and value is not None and not least <= value <= MOST:
                raise InputError(f"{field.name} must be from {least} to {MOST}, not {value}")
        if not self.paths or set(self.paths) - set(PATHS):
            raise InputError(f"paths must be some of {', '.join(PATHS)}, not {', '.join(self.paths) or 'none'}")
