"""The planner: pack, then per layer reorder and stand, then per micro-batch replicate and split.

Layers are independent, so they are planned by threads; the kernels hold no GIL. Nothing random depends on the number
of threads, and every choice is made in whole numbers, so every rank makes the same plan (they compare its digest).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.core.schedule import Schedule
from equilibra.plan import bounds
from equilibra.plan.layer import Choice, LayerCopies, Means, choose, fill
from equilibra.plan.pack import pack
from equilibra.plan.planner import StepProblem

__all__ = ["Equilibra", "stage_plan"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Equilibra:
    """Our planner. Its mechanisms can be switched off one by one, for ablations."""

    name: str = "equilibra"
    """in the registry and in plans"""
    pack: bool = True
    """give sequences to micro-batches by their routing"""
    reorder: bool = True
    """move homes between steps"""
    standing: bool = True
    """standing copies across nodes"""
    flash: bool = True
    """flash copies inside a node"""
    tolerance: float = 0.005
    """imbalance accepted for fewer flash copies"""
    min_tokens_per_copy: int | None = None
    """tokens below which no flash copy is made; None: what a copy costs"""
    means: Means = field(default_factory=Means)
    """how hard to search; slots and switches come from the problem and from this class"""
    threads: int | None = None
    """threads to plan with; None: one per processor"""

    def plan(self, problem: StepProblem) -> StepPlan:
        """Plan one step."""
        cluster, rates = problem.cluster, problem.rates
        schedule: Schedule | None = problem.schedule
        if self.pack and problem.sequences is not None and problem.tokens_per_rank is not None:
            schedule = pack(problem.sequences, cluster, tokens_per_rank=problem.tokens_per_rank, home=problem.home_now)
        load = problem.load_under(schedule)
        means = replace(
            self.means,
            reorder=self.reorder,
            standing_slots=problem.standing_slots if self.standing else 0,
            spare_slots=problem.spare_slots if self.flash else 0,
            tolerance=self.tolerance,
            seed=problem.seed,
        )
        home = problem.home_now.home_of_expert
        layers = range(load.num_layers)
        choices = self._each(lambda layer: choose(load, layer, home[layer], cluster, rates, means), layers)
        standing = _on_ranks(choices, load, cluster)
        placement = Placement(home_of_expert=np.stack([c.home_of_expert for c in choices]), cluster=cluster)
        stages: dict[Stage, StagePlan] = {}
        by_minimum: dict[int, StagePlan] = {}
        for stage in Stage:
            minimum = self.min_tokens_per_copy
            minimum = rates.min_tokens_per_copy(stage) if minimum is None else minimum
            if minimum not in by_minimum:
                by_minimum[minimum] = self._stage(load, placement, standing, means, minimum)
            stages[stage] = by_minimum[minimum]
        return StepPlan(
            planner=self.name, placement=placement, previous=problem.home_now, standing=standing, stages=stages,
            bound_LM=bounds.any_plan(load), schedule=schedule,
        )  # fmt: skip

    def _stage(
        self, load: StepLoad, placement: Placement, standing: StandingCopies, means: Means, minimum: int
    ) -> StagePlan:
        first = np.searchsorted(standing.layer, np.arange(load.num_layers + 1))

        def one(layer: int) -> LayerCopies:
            these = slice(first[layer], first[layer + 1])
            return fill(
                load, layer, placement.home_of_expert[layer], standing.expert[these], standing.rank[these],
                placement.cluster, slots=means.spare_slots, tolerance=means.tolerance, min_tokens=minimum,
            )  # fmt: skip

        return stage_plan(self._each(one, range(load.num_layers)))

    def _each(self, function: Callable[[int], T], layers: range) -> list[T]:
        threads = self.threads or len(os.sched_getaffinity(0))
        if threads == 1 or len(layers) == 1:
            return [function(layer) for layer in layers]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, layers))


def stage_plan(layers: list[LayerCopies]) -> StagePlan:
    """The layers' copies as one plan."""
    num = np.concatenate([layer.num_of_micro_batch for layer in layers])
    return StagePlan(
        first_of_problem=np.concatenate([[0], np.cumsum(num)]).astype(np.int64),
        expert=np.concatenate([layer.expert for layer in layers]),
        rank=np.concatenate([layer.rank for layer in layers]),
        origin=np.concatenate([layer.origin for layer in layers]),
        tokens_FR=np.concatenate([layer.tokens_FR for layer in layers]),
        standing_tokens_CMR=np.concatenate([layer.standing_tokens_CMR for layer in layers]),
    )


def _on_ranks(choices: list[Choice], load: StepLoad, cluster: Cluster) -> StandingCopies:
    """A rank of its node for every standing copy: the one that holds fewest, then the least loaded of the layer.

    So no rank holds more than its share of the node's standing copies over all layers: memory is even.
    """
    group = cluster.ranks_per_node
    held = np.zeros(cluster.num_ranks, np.int64)
    batch_LE = load.tokens_MLER.sum(axis=(0, 3), dtype=np.int64)
    rows: list[tuple[int, int, int]] = []
    for layer, choice in enumerate(choices):
        if not choice.standing_expert.size:
            continue
        loaded = np.bincount(choice.home_of_expert, weights=batch_LE[layer], minlength=cluster.num_ranks)
        chosen: list[tuple[int, int, int]] = []
        for expert, node in zip(choice.standing_expert.tolist(), choice.standing_node.tolist(), strict=True):
            ranks = np.arange(node * group, (node + 1) * group)
            rank = int(ranks[np.lexsort((loaded[ranks], held[ranks]))[0]])
            held[rank] += 1
            chosen.append((layer, expert, rank))
        rows += sorted(chosen)
    table: NDArray[np.int32] = np.array(rows, np.int32).reshape(-1, 3)
    return StandingCopies(layer=table[:, 0].copy(), expert=table[:, 1].copy(), rank=table[:, 2].copy())
