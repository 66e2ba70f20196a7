"""Loads: how many tokens each expert gets, before and after sequences are given to micro-batches.

Symbols: S sequences, M micro-batches, L MoE layers, R ranks, E experts. A token routed to k experts counts
once for each of them, so a load is a number of (token, expert) pairs, which is what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SequenceLoad", "StepLoad"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLoad:
    """The load of each sequence, the unit that can be given to a micro-batch."""

    tokens_SLE: NDArray[np.int32]
    """[S, L, E] tokens of each sequence that each expert of each layer gets."""
    length_of_sequence: NDArray[np.int64]
    """[S] tokens of each sequence, also those whose routing was not recorded."""

    def __post_init__(self) -> None:
        tokens, lengths = self.tokens_SLE, self.length_of_sequence
        if tokens.ndim != 3 or 0 in tokens.shape:
            raise InputError(f"sequence loads must be [sequences, layers, experts], all > 0, not {tokens.shape}")
        if tokens.dtype != np.int32:
            raise InputError(f"sequence loads must be int32, not {tokens.dtype}")
        if lengths.shape != tokens.shape[:1]:
            raise InputError(f"{tokens.shape[0]} sequences need as many lengths, not shape {lengths.shape}")
        if lengths.min() < 1 or tokens.min() < 0:
            raise InputError("sequence lengths must be at least 1 and loads not negative")

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.tokens_SLE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.tokens_SLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.tokens_SLE.shape[2])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoad:
    """The load of one training step: what every planner sees."""

    tokens_MLER: NDArray[np.int32]
    """[M, L, E, R] tokens that each source rank holds in each micro-batch for each expert of each layer."""

    def __post_init__(self) -> None:
        tokens = self.tokens_MLER
        if tokens.ndim != 4 or 0 in tokens.shape:
            raise InputError(
                f"a step load must be [micro-batches, layers, experts, source ranks], all > 0, not {tokens.shape}"
            )
        if tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
            raise InputError(f"a step load must be a contiguous int32 array, not {tokens.dtype}")
        if tokens.min() < 0:
            raise InputError("loads must not be negative")

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return int(self.tokens_MLER.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.tokens_MLER.shape[1])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.tokens_MLER.shape[3])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.tokens_MLER.shape[2])

    def expert_load(self) -> NDArray[np.int64]:
        """[M, L, E] tokens each expert gets from all sources."""
        load_MLE: NDArray[np.int64] = self.tokens_MLER.sum(axis=3, dtype=np.int64)
        return load_MLE
