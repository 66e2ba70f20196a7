"""Imbalance: slowest rank over mean rank. 1.0 is perfect; R means that one of R ranks has all the load.

Symbols: R ranks (or nodes). An all-zero load has imbalance 1.0: no rank waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad

__all__ = ["ImbalanceSpread", "imbalance", "spread", "static_imbalance"]


@dataclass(frozen=True, kw_only=True)
class ImbalanceSpread:
    """Mean, 99th percentile and maximum over micro-batches and layers."""

    mean: float
    p99: float
    worst: float


def imbalance(load: NDArray[Any]) -> NDArray[np.float64]:
    """[...] imbalance of loads [..., R]: maximum over mean of the last axis."""
    if load.ndim < 1 or load.shape[-1] < 1:
        raise InputError(f"a load must be [..., ranks] with at least one rank, not {load.shape}")
    if load.size and not (np.isfinite(load).all() and load.min() >= 0):
        raise InputError(f"loads must be finite and not negative, not {load.min()} to {load.max()}")
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.where(mean > 0, load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)


def spread(imbalances: NDArray[np.float64]) -> ImbalanceSpread:
    """Mean, 99th percentile and maximum of imbalances."""
    return ImbalanceSpread(
        mean=float(imbalances.mean()), p99=float(np.percentile(imbalances, 99)), worst=float(imbalances.max())
    )


def static_imbalance(load: StepLoad) -> float:
    """Slowest over mean rank, mean over layers and micro-batches, with contiguous homes and without copies."""
    load_MLE = load.expert_load()
    return float(imbalance(load_MLE.reshape(*load_MLE.shape[:2], load.num_ranks, -1).sum(axis=3)).mean())
