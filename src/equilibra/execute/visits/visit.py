"""A visit: one pass of one micro-batch through one layer on this rank, with everything that is known before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.plan import Stage
from equilibra.events.schema import StageNumber
from equilibra.execute.visits.tables import Instances, ReceiveTable, SendTable

__all__ = ["NUMBER", "STAGE", "Tables", "Where", "on_device"]

NUMBER = {Stage.LOGPROB: StageNumber.LOGPROB, Stage.UPDATE: StageNumber.UPDATE}
STAGE = {number: stage for stage, number in NUMBER.items()}


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which visit."""

    stage: StageNumber
    """log-prob or update"""
    micro_batch: int
    """number in the plan, -1 where there is none"""
    layer: int
    """MoE layer"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Sizes on the host, indices on the device."""

    instances: Instances
    """of all ranks"""
    sent_sizes: list[int]
    """rows to each rank"""
    received_sizes: list[int]
    """rows from each rank"""
    instance_sizes: list[int]
    """rows of each of this rank's instances: homes, standing copies, flash copies"""
    num_homes: int
    """instances that are homes"""
    num_standing: int
    """instances that are standing copies; they follow the homes"""
    sent_tokens: NDArray[np.int32]
    """[N sent] on the host: the token of each row"""
    row_of_pair: Tensor
    """[T, K]"""
    received_of_grouped: Tensor | None
    """[N received]; None: they are in this order already"""
    grouped_of_received: Tensor | None
    """[N received]"""

    @cached_property
    def token_of_row(self) -> Tensor:
        """[N sent]; kernels on GPUs do without it."""
        return _index(self.sent_tokens, self.row_of_pair.device)

    @property
    def num_bytes(self) -> int:
        """Of the arrays, on host and device."""
        arrays = (self.sent_tokens, self.row_of_pair, self.received_of_grouped, self.grouped_of_received)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_rows(self) -> int:
        """Pairs this rank computes."""
        return sum(self.instance_sizes)

    @property
    def flash_rows(self) -> int:
        """Pairs its flash copies compute."""
        return sum(self.instance_sizes[self.num_homes + self.num_standing :])


def _index(values: NDArray[np.int32], device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def on_device(instances: Instances, sent: SendTable, received: ReceiveTable, rank: int, device: torch.device) -> Tables:
    """Tables of one rank; index arrays go to the device without waiting for it.

    A rank that is alone sends nothing: its rows are made in the order in which they are computed.
    """
    alone = received.size_of_source.size == 1
    sent_tokens = sent.token_of_row[received.received_of_grouped] if alone else sent.token_of_row
    row_of_pair = received.grouped_of_received[sent.row_of_pair] if alone else sent.row_of_pair

    return Tables(
        instances=instances,
        sent_sizes=sent.counts_RE.sum(axis=1).tolist(),
        received_sizes=received.size_of_source.tolist(),
        instance_sizes=received.size_of_instance.tolist(),
        num_homes=int((instances.home_of_expert == rank).sum()),
        num_standing=int((instances.standing_rank == rank).sum()),
        sent_tokens=sent_tokens,
        row_of_pair=_index(row_of_pair, device),
        received_of_grouped=None if alone else _index(received.received_of_grouped, device),
        grouped_of_received=None if alone else _index(received.grouped_of_received, device),
    )
