"""How a step is run: stages, parallelism and prefetching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from equilibra.core.checks import check_whole

__all__ = ["CopyPath", "RunSetting"]


class CopyPath(StrEnum):
    """Where flash copies come from."""

    NVLINK = "nvlink"
    """from the device that is home: fast, shares the links with dispatch and combine"""
    HOST = "host"
    """from memory of the node that every rank reads: slower, disturbs no other link; gradients still use NVLink"""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """One way to run a step. The expert-parallel group is the problem's cluster; everything here is on top of it."""

    prefetch_depth: int = 1
    """layers ahead that flash copies may be fetched; 0: while the layer's own attention runs"""
    activation_recompute: bool = True
    """compute activations anew in the backward pass, layer by layer"""
    pipeline_stages: int = 1
    """parts of the model that follow each other, each on an expert-parallel group of its own (1F1B)"""
    data_parallel: int = 1
    """expert-parallel groups that work on different sequences"""
    optimizer_steps: int = 1
    """optimizer steps of the update (mini-batches); standing copies are fetched anew for each"""
    logprob_stage: bool = True
    """whether old log-probabilities are computed anew before the update"""
    logprob_path: CopyPath = CopyPath.NVLINK
    """path of flash copies in the log-prob stage"""
    update_path: CopyPath = CopyPath.NVLINK
    """path of flash copies in the update stage"""

    def __post_init__(self) -> None:
        limits = {"prefetch_depth": (0, 1000), "pipeline_stages": (1, 1000), "data_parallel": (1, 4096),
                  "optimizer_steps": (1, 10_000)}  # fmt: skip
        for name, (least, most) in limits.items():
            check_whole(name, getattr(self, name), low=least, high=most)
