"""The planner: pack, then per layer reorder and stand, then per micro-batch replicate and split.

Layers are independent and planned in threads; the kernels release the GIL. The plan does not depend on the number of
threads, so every rank makes the same one (they compare its digest).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits, check_number, check_whole
from equilibra.core.load import Schedule, StepLoad
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.cost.rates import Rates
from equilibra.plan.layer import Choice, LayerProblem, Search, choose, fill, real_cost_us, stay
from equilibra.plan.micro_batch import NO_EXCHANGE, TRIES, CopyCosts
from equilibra.plan.pack import check_budget, joined, pack
from equilibra.plan.planner import StepProblem
from equilibra.plan.relevel import relevel

__all__ = ["Equilibra", "late_stages", "usable_cores"]

T = TypeVar("T")
DEARER_FACTOR = 4
"""factor on the fewest tokens of a flash copy where links are too slow for all copies that pay by their rows"""
LATE = 0.01
"""share of the layers' time by which flash copies may be late before a second link is used"""


class _Filled(NamedTuple):
    choice: Choice
    copies: dict[Stage, StagePlan]
    cost_us: float


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Equilibra(Search):
    """Our planner; each mechanism can be turned off for ablations."""

    name: str = "equilibra"
    pack: bool = True
    """assign sequences to micro-batches by their routing"""
    standing: bool = True
    """standing copies across nodes"""
    flash: bool = True
    """flash copies inside a node"""
    tolerance: float = 0.005
    """imbalance accepted for fewer flash copies"""
    threads: int | None = None
    """threads that plan; None: one per processor"""

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, high=1000, below=True)
        if self.threads is not None:
            check_whole("threads", self.threads, low=1)

    def plan(self, problem: StepProblem) -> StepPlan:
        """The plan of a step; the sequences are packed only where that costs no more than changing nothing."""
        schedule = self._schedule(problem)
        plan, cost_us = self._plan(problem, schedule)
        if schedule is not problem.schedule:
            given = self._layers(problem, problem.load)
            still_us = sum(self._each(lambda layer: stay(given[layer]).cost_us, range(len(given))))
            if cost_us > still_us:
                plan, _ = self._plan(problem, problem.schedule)
        return plan

    def _plan(self, problem: StepProblem, schedule: Schedule | None) -> tuple[StepPlan, float]:
        load = problem.load_under(schedule)
        layers = self._layers(problem, load)
        every = range(len(layers))
        choices = self._each(lambda layer: choose(layers[layer]), every)
        ranks = _on_ranks(choices, load, problem.cluster)

        def filled(layer: int) -> _Filled:
            return self._fill(layers[layer], choices[layer], ranks[layer])

        done = self._each(filled, every)
        # Layers that gave up their standing copies leave gaps: spread the others again until no layer gives up.
        while any(done[layer].choice.standing_expert.size < ranks[layer].size for layer in every):
            choices, before = [layer.choice for layer in done], ranks
            ranks = _on_ranks(choices, load, problem.cluster)
            stale = [layer for layer in every if not np.array_equal(ranks[layer], before[layer])]
            for layer, again in zip(stale, self._each(filled, stale), strict=True):
                done[layer] = again
        home_LE = np.stack([layer.choice.home_of_expert for layer in done])
        placement = Placement(home_of_expert=home_LE, cluster=problem.cluster)
        standing = _standing([layer.choice for layer in done], ranks)
        stages = {}
        for stage in Stage:
            part = StagePlan.joined([layer.copies[stage] for layer in done])
            stages[stage] = relevel(part, load, placement, standing, problem.rates, stage)
        plan = StepPlan(
            planner=self.name, placement=placement, previous=problem.home_now, standing=standing, stages=stages,
            bound_LM=load.lower_bound(), schedule=schedule,
        )  # fmt: skip
        return plan, sum(layer.cost_us for layer in done)

    def _schedule(self, problem: StepProblem) -> Schedule | None:
        if not self.pack or problem.sequences is None or problem.tokens_per_rank is None:
            return problem.schedule
        ranks_per_sequence = problem.schedule.ranks_per_sequence if problem.schedule else 1
        packed = partial(
            pack, cluster=problem.cluster, tokens_per_rank=problem.tokens_per_rank, home=problem.home_now,
            ranks_per_sequence=ranks_per_sequence, least_micro_batches=problem.least_micro_batches,
            token_cost=problem.rates.token_cost,
        )  # fmt: skip
        if problem.mini_batch_of_sequence is None:
            return packed(problem.sequences)
        check_budget(problem.sequences.length_of_sequence, problem.tokens_per_rank * ranks_per_sequence)
        return joined(problem.sequences, problem.mini_batch_of_sequence, packed)

    def _layers(self, problem: StepProblem, load: StepLoad) -> list[LayerProblem]:
        slots = min(problem.spare_slots, load.num_experts) if self.flash else 0
        standing_slots = problem.standing_slots if self.standing else 0
        limits = PlanLimits(**problem.limits(spare_slots=slots, standing_slots=standing_slots))
        return [
            LayerProblem(
                load=load, layer=layer, home=home, cluster=problem.cluster, rates=problem.rates, limits=limits,
                search=self,
            )
            for layer, home in enumerate(problem.home_now.home_of_expert)
        ]  # fmt: skip

    def _fill(self, layer: LayerProblem, choice: Choice, ranks: NDArray[np.int64]) -> _Filled:
        """The layer with copies that even out traffic, else without those, else with none, where that is cheaper."""
        still = stay(layer)
        for row_slack, dearer in ((layer.rates.row_slack, 1), (NO_EXCHANGE, 1), (NO_EXCHANGE, DEARER_FACTOR)):
            copies = self._copies(layer, choice, ranks, row_slack, dearer)
            cost_us = real_cost_us(layer, choice, ranks, copies)
            if cost_us <= still.cost_us:
                return _Filled(choice, copies, cost_us)
        if choice.standing_expert.size or not np.array_equal(choice.home_of_expert, layer.home):
            return self._fill(layer, still, ranks[:0])  # flash copies alone may still pay
        none = np.zeros((0, layer.load.num_micro_batches, layer.cluster.num_ranks), np.int32)
        return _Filled(still, dict.fromkeys(Stage, StagePlan.without_flash(none)), still.cost_us)

    def _copies(
        self, layer: LayerProblem, choice: Choice, ranks: NDArray[np.int64], row_slack: float, dearer: int
    ) -> dict[Stage, StagePlan]:
        """Copies of both stages, made once where the prices are equal."""
        costs = {}
        for stage in Stage:
            hold, serve = layer.rates.hold_rows(stage), layer.rates.serve_rows(stage)
            least = dearer * layer.rates.min_tokens_per_copy(stage)
            costs[stage] = CopyCosts(self.tolerance, hold, serve, least, TRIES)
        by_cost = {cost: fill(layer, choice, ranks, cost, row_slack) for cost in set(costs.values())}
        return {stage: by_cost[costs[stage]] for stage in Stage}

    def _each(self, function: Callable[[int], T], layers: Sequence[int]) -> list[T]:
        threads = self.threads or usable_cores()
        if threads == 1 or len(layers) == 1:
            return [function(layer) for layer in layers]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, layers))


def _on_ranks(choices: list[Choice], load: StepLoad, cluster: Cluster) -> list[NDArray[np.int64]]:
    """A rank for every standing copy: of its node the one with fewest (memory stays even), then the least loaded."""
    group = cluster.ranks_per_node
    held = np.zeros(cluster.num_ranks, np.int64)
    batch_LE = load.tokens_MLER.sum(axis=(0, 3), dtype=np.int64)
    result = []
    for layer, choice in enumerate(choices):
        loaded = np.bincount(choice.home_of_expert, weights=batch_LE[layer], minlength=cluster.num_ranks)
        ranks = np.zeros(choice.standing_node.size, np.int64)
        for c, node in enumerate(choice.standing_node.tolist()):
            of_node = np.arange(node * group, (node + 1) * group)
            ranks[c] = of_node[np.lexsort((loaded[of_node], held[of_node]))[0]]
            held[ranks[c]] += 1
        result.append(ranks)
    return result


def _standing(choices: list[Choice], ranks: list[NDArray[np.int64]]) -> StandingCopies:
    layer = np.repeat(np.arange(len(choices)), [rank.size for rank in ranks])
    return StandingCopies(
        layer=layer.astype(np.int32),
        expert=np.concatenate([choice.standing_expert for choice in choices]).astype(np.int32),
        rank=np.concatenate(ranks).astype(np.int32),
    )


def late_stages(plan: StepPlan, load: StepLoad, rates: Rates) -> frozenset[Stage]:
    """Stages whose transfers exceed the layers that hide them by more than LATE, so that a second link pays."""
    late = []
    for stage in Stage:
        rows_PR = plan.rank_load(load, stage).reshape(-1, plan.cluster.num_ranks)
        link_us = np.maximum(*plan.stages[stage].on_links()).max(axis=1) * rates.link_us[stage]
        layer_us = rows_PR.max(axis=1) * rates.row_us[stage] + rows_PR.mean(axis=1) * rates.gap_row_us[stage]
        hidden_us = layer_us + rates.gap_us[stage]
        if np.maximum(link_us - hidden_us, 0.0).sum() > LATE * hidden_us.sum():
            late.append(stage)
    return frozenset(late)
