"""The contenders of the runtime bench: routing and plan of each, for one case.

Symbols: M micro-batches, L layers, R ranks, E experts, T tokens, K experts per token, C standing copies.

static, equilibra     the recorded routing under the plan of that planner; homes are contiguous and stay.
eplb-oracle           the recorded routing under EPLB's plan, from EPLB's own homes: see `on_even_homes`.
forced-balanced       other routing under the static plan: the same number of tokens and rows, but every expert, and so
                      every rank, has the same number of rows, to within one. No plan can make the slowest rank faster.
                      Rows are even over experts and not only over ranks, as under a perfectly balanced router. Rows
                      take longer in small products than in large ones, so this choice affects the figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.runtime.case import CLUSTER, Case, Routing
from equilibra.core.errors import PlanError
from equilibra.core.load import StepLoad
from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.cost.rates import Rates
from equilibra.plan.baselines import Eplb, Static
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra

STATIC, EPLB, EQUILIBRA, BALANCED = "static", "eplb-oracle", "equilibra", "forced-balanced"
NAMES = (STATIC, EPLB, EQUILIBRA, BALANCED)
PLAIN = "plain"
"""the layer without a runtime, which runs beside them"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """Routing and plan that the ranks execute under one name."""

    name: str
    """one of NAMES"""
    experts_MR: Routing
    """experts of every token"""
    load: StepLoad
    """the same, counted"""
    plan: StepPlan
    """homes are contiguous"""


def contenders(case: Case, *, rates: Rates, spare_slots: int) -> list[Contender]:
    """All contenders of a case; every rank makes the same ones."""
    problem = StepProblem(cluster=CLUSTER, given_load=case.load, rates=rates, spare_slots=spare_slots)
    static, ours = Static().plan(problem), Equilibra(threads=1).plan(problem)
    even = balanced_routing(case.experts_MR, case.load.num_experts)
    even_load = counted(even, case.load.num_experts)
    even_problem = StepProblem(cluster=CLUSTER, given_load=even_load, rates=rates)
    return [
        Contender(name=STATIC, experts_MR=case.experts_MR, load=case.load, plan=static),
        on_even_homes(case, Eplb().plan(problem)),
        Contender(name=EQUILIBRA, experts_MR=case.experts_MR, load=case.load, plan=ours),
        Contender(name=BALANCED, experts_MR=even, load=even_load, plan=Static().plan(even_problem)),
    ]


def counted(experts_MR: Routing, num_experts: int) -> StepLoad:
    """The load of this routing."""
    num_layers = experts_MR[0][0].shape[1]
    tokens_MLER = np.zeros((len(experts_MR), num_layers, num_experts, CLUSTER.num_ranks), np.int32)
    for m, ranks in enumerate(experts_MR):
        for rank, experts_TLK in enumerate(ranks):
            for layer in range(num_layers):
                tokens_MLER[m, layer, :, rank] = np.bincount(experts_TLK[:, layer].ravel(), minlength=num_experts)
    return StepLoad(tokens_MLER=tokens_MLER)


def balanced_routing(experts_MR: Routing, num_experts: int, seed: int = 0) -> Routing:
    """Routing of as many tokens in which all experts, and so all ranks, get as many rows, to one.

    Pairs of a micro-batch's tokens go round the experts, which alternate between the ranks' homes, so that a token's
    experts differ and are on both ranks, as in real routing. Which token is next is random.
    """
    generator = np.random.default_rng(seed)
    by_rank = np.arange(num_experts).reshape(CLUSTER.num_ranks, -1)
    result: Routing = []
    for ranks in experts_MR:
        sizes = [len(experts) for experts in ranks]
        num_tokens, (num_layers, top_k) = sum(sizes), ranks[0].shape[1:]
        experts_TLK = np.empty((num_tokens, num_layers, top_k), np.int64)
        for layer in range(num_layers):
            round_E = generator.permuted(by_rank, axis=1).T.ravel()
            pair_TK = np.arange(num_tokens * top_k).reshape(num_tokens, top_k)
            experts_TLK[:, layer] = round_E[pair_TK[generator.permutation(num_tokens)] % num_experts]
        result.append(np.split(experts_TLK, np.cumsum(sizes)[:-1]))
    return result


def on_even_homes(case: Case, plan: StepPlan) -> Contender:
    """EPLB's instances, each with its rows, executed from contiguous homes: experts are numbered anew.

    EPLB places all instances itself, and which of an expert's instances is called its home is our choice. Each layer's
    homes are chosen so that every rank has E / R of them; then experts are numbered in the order of their homes. So
    every instance is where EPLB wants it before the step begins: moving there is not charged to EPLB, only that weights
    of its redundant experts are fetched, and their gradients returned, once per step. Where no even choice exists (EPLB
    doubled experts on a rank), a home that has no rows makes up the number.
    """
    load, before = case.load, plan.rank_load(case.load)
    has_LER = np.zeros((plan.num_layers, load.num_experts, CLUSTER.num_ranks), np.bool_)
    np.put_along_axis(has_LER, plan.placement.home_of_expert[:, :, None], values=True, axis=2)
    has_LER[plan.standing.layer, plan.standing.expert, plan.standing.rank] = True
    home_LE = np.stack([_even_homes(has_ER) for has_ER in has_LER])
    number_LE = np.argsort(np.argsort(home_LE, axis=1, kind="stable"), axis=1, kind="stable")
    serves_MLERS = _served(plan, load)
    np.put_along_axis(has_LER, home_LE[:, :, None], values=False, axis=2)
    layer, expert, rank = np.nonzero(has_LER)
    order = np.lexsort((rank, number_LE[layer, expert], layer))
    layer, expert, rank = layer[order], expert[order], rank[order]
    standing = StandingCopies(
        layer=layer.astype(np.int32), expert=number_LE[layer, expert].astype(np.int32), rank=rank.astype(np.int32)
    )
    stage = plan.stages[Stage.UPDATE]
    tokens_CMR = np.ascontiguousarray(serves_MLERS[:, layer, expert, rank].transpose(1, 0, 2)).astype(np.int32)
    homes = contiguous(CLUSTER, num_layers=plan.num_layers, num_experts=load.num_experts)
    numbered = np.zeros_like(load.tokens_MLER)
    for at in range(plan.num_layers):
        numbered[:, at, number_LE[at]] = load.tokens_MLER[:, at]
    same = StagePlan(
        first_of_problem=stage.first_of_problem, expert=stage.expert, rank=stage.rank, origin=stage.origin,
        tokens_FR=stage.tokens_FR, standing_tokens_CMR=tokens_CMR,
    )  # fmt: skip
    result = Contender(
        name=EPLB,
        experts_MR=[
            [number_LE[np.arange(plan.num_layers)[:, None], experts_TLK] for experts_TLK in ranks]
            for ranks in case.experts_MR
        ],
        load=StepLoad(tokens_MLER=numbered),
        plan=StepPlan(
            planner=plan.planner, placement=homes, previous=homes, standing=standing,
            stages=dict.fromkeys(Stage, same), bound_LM=plan.bound_LM,
        ),
    )  # fmt: skip
    if stage.num_copies or not np.array_equal(result.plan.rank_load(result.load), before):
        raise PlanError("EPLB's plan gives ranks other rows after its experts were numbered anew")
    return result


def _even_homes(has_ER: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[E] a home for every expert, E / R per rank: where it has an instance, as far as that is possible."""
    num_experts, num_ranks = has_ER.shape
    assert num_ranks == 2
    home = np.where(has_ER[:, 1], 1, 0)
    surplus = int(home.sum()) - num_experts // 2
    if surplus > 0:  # first experts with another instance, then those without: a home without rows
        home[np.argsort(np.where(home == 0, 2, ~has_ER[:, 0]), kind="stable")[:surplus]] = 0
    elif surplus < 0:
        home[np.argsort(home, kind="stable")[:-surplus]] = 1
    return home


def _served(plan: StepPlan, load: StepLoad) -> NDArray[np.int64]:
    """[M, L, E, R, S] rows of each source S that the instance on each rank serves."""
    num_micro_batches, num_layers, num_experts, num_ranks = plan.shape
    serves = np.zeros((num_micro_batches, num_layers, num_experts, num_ranks, num_ranks), np.int64)
    standing, tokens_CMR = plan.standing, plan.stages[Stage.UPDATE].standing_tokens_CMR
    serves[:, standing.layer, standing.expert, standing.rank] = tokens_CMR.transpose(1, 0, 2)
    rest = load.tokens_MLER - serves.sum(axis=3)
    layer, expert = np.indices((num_layers, num_experts))
    serves[:, layer, expert, plan.placement.home_of_expert] += rest
    return serves
