"""The compute and moves of a rank in one layer and micro-batch, from a plan.

Symbols: M micro-batches, L layers, E experts, R ranks.

A rank computes its homes, its standing copies and its flash copies, in this order; instances without rows are included,
as in training. Meanwhile it fetches the flash copies of the next layer: the following one in the forward pass, the
previous one in the backward pass. In the backward pass it also returns the gradients of copies it held in the following
layer, and adds those that others return to it. Layers and micro-batches wrap around, so all have neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StepPlan


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank in one layer and micro-batch."""

    staying: tuple[int, ...]
    """rows of every home and standing copy"""
    flash: tuple[int, ...]
    """rows of every flash copy"""
    served: tuple[int, ...] = ()
    """flash copies that others hold of its instances: of each that has any"""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of every instance."""
        return self.staying + self.flash

    @property
    def num_rows(self) -> int:
        """Rows of the rank."""
        return sum(self.sizes)

    @property
    def num_instances(self) -> int:
        """Instances that have rows: weights of others are not read."""
        return sum(size > 0 for size in self.sizes)


Works = list[list[list[RankWork]]]
"""[L][M][R]"""


class Moves(NamedTuple):
    """What moves on a rank's links while it computes a layer, in experts."""

    ahead: int = 0
    """flash copies of the following layer: weights come during the forward pass"""
    behind: int = 0
    """flash copies of the layer before: weights come during the backward pass"""
    returned: int = 0
    """gradients that leave for their home during the backward pass"""
    added: tuple[int, ...] = ()
    """gradients that others have returned and this rank adds: to each instance that gets any"""
    exposed: int = 0
    """flash copies of this very layer: weights come before it starts"""

    @property
    def num_copies(self) -> int:
        """Weights that come in."""
        return self.ahead + self.behind + self.exposed

    def num_bytes(self, weights: int, gradients: int) -> int:
        """Bytes in and out, for experts of this size."""
        return self.num_copies * weights + (self.returned + sum(self.added)) * gradients


STILL = Moves()


def works_of(plan: StepPlan, load: StepLoad) -> Works:
    """Every rank's work in the update under a plan."""
    num_micro_batches, num_layers, _, num_ranks = plan.shape
    load_MLE, stage, standing = load.expert_load(), plan.stages[Stage.UPDATE], plan.standing
    standing_CM = stage.standing_tokens_CMR.sum(axis=2, dtype=np.int64)
    flash_F = stage.tokens_FR.sum(axis=1, dtype=np.int64)

    def one(layer: int, m: int) -> list[RankWork]:
        entry = layer * num_micro_batches + m
        flash = np.arange(stage.first_of_problem[entry], stage.first_of_problem[entry + 1])
        stands = np.flatnonzero(standing.layer == layer)
        left_E = load_MLE[m, layer].copy()
        np.subtract.at(left_E, stage.expert[flash], flash_F[flash])
        np.subtract.at(left_E, standing.expert[stands], standing_CM[stands, m])
        return [
            RankWork(
                staying=(
                    *left_E[plan.placement.home_of_expert[layer] == rank].tolist(),
                    *standing_CM[stands[standing.rank[stands] == rank], m].tolist(),
                ),
                flash=tuple(flash_F[flash[stage.rank[flash] == rank]].tolist()),
                served=_times_each(stage.expert[flash[stage.origin[flash] == rank]]),
            )
            for rank in range(num_ranks)
        ]

    return [[one(layer, m) for m in range(num_micro_batches)] for layer in range(num_layers)]


def _times_each(values: NDArray[np.integer]) -> tuple[int, ...]:
    return tuple(np.unique(values, return_counts=True)[1].tolist())


def balanced_works(load: StepLoad, cluster: Cluster) -> Works:
    """The same number of rows, spread evenly over ranks and their homes, to within one."""
    homes, load_MLE = cluster.experts_per_rank(load.num_experts), load.expert_load()

    def one(layer: int, m: int) -> list[RankWork]:
        rows_R = _even(int(load_MLE[m, layer].sum()), cluster.num_ranks)
        return [RankWork(staying=tuple(_even(rows, homes).tolist()), flash=()) for rows in rows_R.tolist()]

    return [[one(layer, m) for m in range(load.num_micro_batches)] for layer in range(load.num_layers)]


def _even(total: int, parts: int) -> NDArray[np.int64]:
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)


def moves_of(works: Works, layer: int, micro_batch: int) -> list[Moves]:
    """[R] what moves during a layer and micro-batch when copies come one layer ahead."""
    num_layers, num_micro_batches = len(works), len(works[0])
    entry, count = micro_batch * num_layers + layer, num_layers * num_micro_batches
    ahead, behind = ((entry + step) % count for step in (1, -1))
    after, before = (works[at % num_layers][at // num_layers] for at in (ahead, behind))
    return [
        Moves(ahead=len(a.flash), behind=len(b.flash), returned=len(a.flash), added=a.served)
        for a, b in zip(after, before, strict=True)
    ]
