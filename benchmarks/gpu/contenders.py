"""The contenders of the GPU bench for one case.

static             contiguous homes.
eplb-oracle        EPLB's redundant experts for the loads of this very step, where EPLB places them; moving them is not
                   charged.
online-exact       UltraEP's rule, which plans a layer and micro-batch on arrival. Its planning time on the host and the
                   transfer of its copies' weights, both exposed, are measured and added to its layer. Its exchange of
                   counts, its copies in the backward pass and its gradients are not charged.
equilibra          our plan; the copies of neighbouring layers move while a layer computes.
equilibra-host     the same, copies from pinned host memory (or from the second path).
equilibra-still    the same rows without moves: the difference is the cost of copies.
balanced           every rank has the same rows, evenly over its homes.
balanced-again     the same once more: its distance from balanced is noise, because the slowest of many ranks is slow
                   by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from benchmarks.gpu.case import Case, GpuSetting
from benchmarks.gpu.work import STILL, Moves, RankWork, Works, balanced_works, moves_of, works_of
from equilibra.core.load import StepLoad, imbalance
from equilibra.core.plan import StepPlan
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.baselines import Eplb, Static, UltraEP
from equilibra.plan.planner import Planner, StepProblem
from equilibra.plan.step import Equilibra

STATIC, EPLB, ONLINE, EQUILIBRA, BALANCED = "static", "eplb-oracle", "online-exact", "equilibra", "balanced"
OTHER_PATH, STILL_ONE, AGAIN = "equilibra-host", "equilibra-still", "balanced-again"
NAMES = (STATIC, EPLB, ONLINE, EQUILIBRA, OTHER_PATH, STILL_ONE, BALANCED, AGAIN)
"""in the order of the records"""
MICRO_BATCHES = 32
"""micro-batches of a training step; the few that run pay their share of what is paid once a step"""
TRIES = 3
"""tries of the online planner; the best counts, so that other programs are not charged to it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """The rows and copies that run under one name."""

    name: str
    """one of NAMES"""
    works: Works
    """[L][M][R] rows"""
    path: str | None = None
    """path of its copies; None: nothing moves"""
    planning: StepProblem | None = None
    """problem of an online planner: the whole step, planned one layer and micro-batch at a time"""
    standing_copies: int = 0
    """summed over layers"""

    def moves(self, layer: int, micro_batch: int) -> list[Moves]:
        """[R] what moves while a layer computes."""
        works = self.works[layer][micro_batch]
        if self.path is None:
            return [STILL] * len(works)
        if self.planning is not None:
            return [Moves(exposed=len(work.flash)) for work in works]
        return moves_of(self.works, layer, micro_batch)

    def imbalance(self) -> float:
        """Summed rows of slowest ranks over those of mean ranks."""
        rows = np.array([[[work.num_rows for work in ranks] for ranks in layer] for layer in self.works])
        return float(rows.max(axis=2).sum() / rows.mean(axis=2).sum())

    def worst_imbalance(self) -> float:
        rows = np.array([[[work.num_rows for work in ranks] for ranks in layer] for layer in self.works])
        return float(imbalance(rows).max())

    def copies_per_layer(self) -> float:
        """Flash copies per layer and micro-batch."""
        ranks = [work for layer in self.works for works in layer for work in works]
        return sum(len(work.flash) for work in ranks) / (len(self.works) * len(self.works[0]))

    def every_work(self) -> list[RankWork]:
        return [work for layer in self.works for works in layer for work in works]


def contenders(case: Case, setting: GpuSetting) -> list[Contender]:
    """All contenders of a case. Plans are checked against the load."""
    rates = _rates(case, setting)
    problem = _problem(case, case.load, rates, setting)
    online = UltraEP()
    ours, ours_plan = _planned(Equilibra(), problem)
    first, *other = setting.paths
    even = balanced_works(case.load, case.cluster)
    found = [
        Contender(name=STATIC, works=_planned(Static(), problem)[0]),
        Contender(name=EPLB, works=_planned(Eplb(), problem)[0]),
        Contender(name=ONLINE, works=_planned(online, problem)[0], path=first, planning=problem),
        Contender(name=BALANCED, works=even),  # next to its contenders: the clock drifts
        Contender(name=EQUILIBRA, works=ours, path=first, standing_copies=ours_plan.standing.num_copies),
        *[Contender(name=OTHER_PATH, works=ours, path=path) for path in other],
        Contender(name=STILL_ONE, works=ours),
        Contender(name=AGAIN, works=even),
    ]
    ours_plan.check(case.load, spare_slots=setting.spare_slots, standing_slots=setting.standing_slots)
    return found


def _rates(case: Case, setting: GpuSetting) -> Rates:
    """Prices of rows and copies on one device; network traffic is free unless the setting counts it."""
    known = rates_for(case.model, prices_named("h200"), num_nodes=case.cluster.num_nodes)
    part = min(setting.micro_batches / MICRO_BATCHES, 1.0)
    return replace(
        known,
        cross_row_us=known.cross_row_us if setting.network else 0.0,
        standing_copy_us=known.standing_copy_us * part,
        move_us=known.move_us * part,
        move_inside_us=known.move_inside_us * part,
    )


def _problem(case: Case, load: StepLoad, rates: Rates, setting: GpuSetting) -> StepProblem:
    return StepProblem(
        cluster=case.cluster, given_load=load, rates=rates, spare_slots=setting.spare_slots,
        standing_slots=setting.standing_slots,
    )  # fmt: skip


def _planned(planner: Planner, problem: StepProblem) -> tuple[Works, StepPlan]:
    plan = planner.plan(problem)
    plan.check(problem.load)
    return works_of(plan, problem.load), plan


def seconds_to_plan(problem: StepProblem, layer: int, micro_batch: int) -> float:
    """Seconds an online planner takes for one layer and micro-batch with known loads; best of some tries."""
    part = problem.load.tokens_MLER[micro_batch : micro_batch + 1, layer : layer + 1]
    alone = StepProblem(
        cluster=problem.cluster, given_load=StepLoad(tokens_MLER=np.ascontiguousarray(part)), rates=problem.rates,
        spare_slots=problem.spare_slots, standing_slots=problem.standing_slots,
    )  # fmt: skip
    _ = alone.home_now  # cached before timing
    took = []
    for _ in range(TRIES):
        start = perf_counter()
        UltraEP().plan(alone)
        took.append(perf_counter() - start)
    return min(took)
