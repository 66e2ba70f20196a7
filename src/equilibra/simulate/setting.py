"""How a step is run: stages, parallelism and prefetching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from equilibra.core.checks import check_whole

__all__ = ["CopyPath", "RunSetting"]


class CopyPath(StrEnum):
    """Where flash copies come from."""

    NVLINK = "nvlink"
    """from the home device: fast, but shares links with dispatch and combine"""
    HOST = "host"
    """from host memory shared by the node: slower, but on a link of its own; gradients still use NVLink"""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """How a step is run, on top of the expert-parallel group that the problem's cluster describes."""

    prefetch_depth: int = 1
    """layers by which flash copies are prefetched; 0: during the layer's own attention"""
    activation_recompute: bool = True
    """recompute activations in the backward pass, layer by layer"""
    pipeline_stages: int = 1
    """pipeline stages (1F1B), each on its own expert-parallel group"""
    data_parallel: int = 1
    """data-parallel replicas, each with its own sequences"""
    optimizer_steps: int = 1
    """optimizer steps (mini-batches) of the update; each fetches standing copies again"""
    logprob_stage: bool = True
    """recompute the old log-probs before the update"""
    logprob_path: CopyPath = CopyPath.NVLINK
    """path of flash copies in the log-prob stage"""
    update_path: CopyPath = CopyPath.NVLINK
    """path of flash copies in the update stage"""

    def __post_init__(self) -> None:
        limits = {"prefetch_depth": (0, 1000), "pipeline_stages": (1, 1000), "data_parallel": (1, 4096),
                  "optimizer_steps": (1, 10_000)}  # fmt: skip
        for name, (least, most) in limits.items():
            check_whole(name, getattr(self, name), low=least, high=most)
