"""What an engine is built from, and what it reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.checks import check_choice, check_text, check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import imbalance
from equilibra.execute.experts import MoESpec
from equilibra.execute.state.published import Naming
from equilibra.rollout.control import Target
from equilibra.rollout.instances import Instances
from equilibra.rollout.scheduler import Batch

TRANSPORTS = ("shared", "gloo")


@dataclass(frozen=True, kw_only=True)
class PoolSetting:
    """Processes and memory of an engine."""

    attention: int = 1
    """attention processes"""
    experts: int = 1
    """expert processes"""
    micro_batches: int = 2
    """in flight per attention process"""
    places: int = 64
    """most answers an attention process works on at once"""
    kv_tokens: int = 16_384
    """tokens in the KV cache of an attention process"""
    page: int = 16
    """tokens per page"""
    prefill_tokens: int = 512
    """most prompt tokens per pass"""
    spare_slots: int = 1
    """copies of hot experts per layer and expert process"""
    threads: int = 1
    """of each process"""
    transport: str = "shared"
    """how rows travel: shared (host memory; on GPUs, GPU memory) or gloo (connections)"""
    devices: str = ""
    """assigned in turn to attention, then expert processes: cpu, or cuda:2,cuda:3; empty: the model's"""

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, choices=TRANSPORTS)
        check_text("devices", self.devices, empty=True)
        if self.devices and not re.fullmatch(r"cpu|cuda:\d+(,cuda:\d+)*", self.devices):
            raise InputError(f"devices = {self.devices!r}: it must be cpu, or GPUs such as cuda:2,cuda:3")
        for name in (one.name for one in fields(self) if one.type == "int"):
            check_whole(name, getattr(self, name), low=0 if name == "spare_slots" else 1, high=2**31 - 1)
        if self.kv_tokens < self.page:
            raise InputError(f"kv_tokens = {self.kv_tokens} is less than a page of {self.page} tokens: raise it")

    def device_of(self, process: int, model: PoolModel) -> torch.device:
        """process: number, attention processes first."""
        named = self.devices.split(",")
        return torch.device(named[process % len(named)]) if self.devices else model.device

    @property
    def num_pages(self) -> int:
        return self.kv_tokens // self.page


class Routed(NamedTuple):
    """The tokens of an MoE layer, without padding; a forward pass stops there."""

    layer: int
    hidden_TD: Tensor
    experts_TK: Tensor
    weights_TK: Tensor


Pass = Generator[Routed, Tensor, Tensor]
"""is sent the sum [T, D] of the experts' weighted results; returns logits [B, V] of last tokens"""


class AttentionModel(Protocol):
    """A model without its experts."""

    @property
    def targets(self) -> Mapping[str, list[Target]]:
        """Dense tensors by published name."""

    def forward(self, batch: Batch) -> Pass:
        """Process a batch's tokens."""


@dataclass(frozen=True, kw_only=True)
class PoolModel:
    """The model an engine serves."""

    spec: MoESpec
    naming: Naming
    num_layers: int
    """MoE layers"""
    vocabulary: int
    """number of tokens"""
    attention: Callable[[torch.dtype, torch.device], AttentionModel]
    """builds everything but the experts; picklable"""
    load: tuple[str, ...] = ()
    """modules to import before workers are forked"""
    end: int
    """token that ends an answer"""
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(kw_only=True, eq=False)
class Statistics:
    """What attention processes have done since instances were last chosen."""

    home_LE: NDArray[np.int32]
    """process of every expert"""
    tokens_LE: NDArray[np.int64]
    """pairs of every expert"""
    rows_LN: NDArray[np.int64]
    """pairs sent to each expert process"""
    passes: int = 0
    """forward passes of micro-batches"""
    preempted: int = 0
    """times a sequence was set aside for another"""

    @classmethod
    def none(cls, instances: Instances) -> Statistics:
        rows_LN = np.zeros((len(instances.home_LE), instances.num_processes), np.int64)
        return cls(home_LE=instances.home_LE, tokens_LE=np.zeros_like(instances.home_LE, np.int64), rows_LN=rows_LN)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            home_LE=self.home_LE, tokens_LE=self.tokens_LE + other.tokens_LE, rows_LN=self.rows_LN + other.rows_LN,
            passes=self.passes + other.passes, preempted=self.preempted + other.preempted,
        )  # fmt: skip

    @property
    def imbalance(self) -> float:
        """Slowest over mean expert process, averaged over layers."""
        return float(imbalance(self.rows_LN).mean())

    @property
    def imbalance_without_copies(self) -> float:
        """The imbalance if every pair had been computed at its expert's home."""
        rows_LN = np.zeros_like(self.rows_LN)
        np.add.at(rows_LN, (np.arange(len(rows_LN))[:, None], self.home_LE), self.tokens_LE)
        return float(imbalance(rows_LN).mean())
