"""What the GPU bench compares, for one case.

static             contiguous homes.
eplb-oracle        EPLB's redundant experts for the loads of this very step, where EPLB wants them; moving them there
                   is not charged.
online-exact       UltraEP's rule, which plans a layer and micro-batch when it comes. What its planning takes on the
                   host, and the weights of its copies, which nothing hides, are measured and added to its layer. Its
                   exchange of counts, its copies in the backward pass and its gradients are not charged.
equilibra          our plan; the copies of the neighbour layers move while a layer computes.
equilibra-host     the same, copies from pinned memory of the host (or from the other path than the first).
equilibra-still    the same rows, nothing moves: what copies cost is the difference.
balanced           every rank has the same rows, evenly over its homes.
balanced-again     the same once more: what it falls short of balanced is noise, the slowest of many ranks being slow by
                   chance.
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
"""in the order of records"""
MICRO_BATCHES = 32
"""of a training step, of which the bench plans and runs a few: they pay their part of what is paid once a step"""
TRIES = 3
"""of the online planner: other programs must not be charged to it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """What is run under one name."""

    name: str
    """one of NAMES"""
    works: Works
    """[L][M][R] rows"""
    path: str | None = None
    """how its copies travel; None: nothing moves"""
    planning: StepProblem | None = None
    """of an online planner: the whole step, of which it plans a layer and micro-batch at a time"""
    standing_copies: int = 0
    """of all layers"""

    def moves(self, layer: int, micro_batch: int) -> list[Moves]:
        """[R] what moves with a layer."""
        works = self.works[layer][micro_batch]
        if self.path is None:
            return [STILL] * len(works)
        if self.planning is not None:
            return [Moves(exposed=len(work.flash)) for work in works]
        return moves_of(self.works, layer, micro_batch)

    def imbalance(self) -> float:
        """Rows of slowest ranks over those of mean ranks, all layers and micro-batches together."""
        rows = np.array([[[work.num_rows for work in ranks] for ranks in layer] for layer in self.works])
        return float(rows.max(axis=2).sum() / rows.mean(axis=2).sum())

    def worst_imbalance(self) -> float:
        """Of the worst layer and micro-batch."""
        rows = np.array([[[work.num_rows for work in ranks] for ranks in layer] for layer in self.works])
        return float(imbalance(rows).max())

    def copies_per_layer(self) -> float:
        """Flash copies per layer and micro-batch."""
        ranks = [work for layer in self.works for works in layer for work in works]
        return sum(len(work.flash) for work in ranks) / (len(self.works) * len(self.works[0]))

    def every_work(self) -> list[RankWork]:
        """Of all layers, micro-batches and ranks."""
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
        Contender(name=BALANCED, works=even),  # beside what is compared with it
        Contender(name=EQUILIBRA, works=ours, path=first, standing_copies=ours_plan.standing.num_copies),
        *[Contender(name=OTHER_PATH, works=ours, path=path) for path in other],
        Contender(name=STILL_ONE, works=ours),
        Contender(name=AGAIN, works=even),
    ]
    ours_plan.check(case.load, spare_slots=setting.spare_slots, standing_slots=setting.standing_slots)
    return found


def _rates(case: Case, setting: GpuSetting) -> Rates:
    """Prices of what is run here: rows and copies on one device, and no network unless it is asked for."""
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
    """What an online planner takes on the host for one layer and micro-batch, loads at hand; the best of some tries."""
    part = problem.load.tokens_MLER[micro_batch : micro_batch + 1, layer : layer + 1]
    alone = StepProblem(
        cluster=problem.cluster, given_load=StepLoad(tokens_MLER=np.ascontiguousarray(part)), rates=problem.rates,
        spare_slots=problem.spare_slots, standing_slots=problem.standing_slots,
    )  # fmt: skip
    _ = alone.home_now  # known before
    took = []
    for _ in range(TRIES):
        start = perf_counter()
        UltraEP().plan(alone)
        took.append(perf_counter() - start)
    return min(took)
