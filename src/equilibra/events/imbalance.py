"""Imbalance: slowest rank over mean rank. 1.0 is perfect, R is everything on one of R ranks.

Symbols: M micro-batches, L layers, R ranks (or nodes). A load of zero everywhere has imbalance 1.0: nobody
waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equilibra.core.load import StepLoad

__all__ = [
    "ImbalanceSpread",
    "imbalance",
    "imbalance_of_batch",
    "imbalance_of_micro_batches",
    "spread",
    "static_imbalance",
]


@dataclass(frozen=True, kw_only=True)
class ImbalanceSpread:
    """Imbalance over many micro-batches and layers."""

    mean: float
    """mean over all micro-batches and layers, each counting once"""
    p99: float
    """99th percentile of them"""
    worst: float
    """largest of them"""


def imbalance(load: NDArray[Any]) -> NDArray[np.float64]:
    """[...] imbalance of loads [..., R]: the largest over the mean of the last axis."""
    if load.ndim < 1 or load.shape[-1] < 1:
        raise InputError(f"a load must be [..., ranks] with at least one rank, not {load.shape}")
    if load.size and not (np.isfinite(load).all() and load.min() >= 0):
        raise InputError("loads must be numbers that are not negative")
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.where(mean > 0, load.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)


def imbalance_of_batch(load_MLR: NDArray[Any]) -> float:
    """Mean over layers of the imbalance of the batch total; loads [M, L, R]."""
    return float(imbalance(load_MLR.sum(axis=0)).mean())


def imbalance_of_micro_batches(load_MLR: NDArray[Any]) -> ImbalanceSpread:
    """Imbalance of each micro-batch and layer; loads [M, L, R]."""
    return spread(imbalance(load_MLR))


def spread(imbalances: NDArray[np.float64]) -> ImbalanceSpread:
    """Mean, 99th percentile and worst of imbalances."""
    return ImbalanceSpread(
        mean=float(imbalances.mean()), p99=float(np.percentile(imbalances, 99)), worst=float(imbalances.max())
    )


def static_imbalance(load: StepLoad) -> float:
    """Slowest over mean rank, mean over layers and micro-batches, with contiguous homes and without copies."""
    load_MLE = load.expert_load()
    return float(imbalance(load_MLE.reshape(*load_MLE.shape[:2], load.num_ranks, -1).sum(axis=3)).mean())
