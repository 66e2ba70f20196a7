"""Plan in one call, for scripts and other runtimes: a step, or many problems of one layer and micro-batch.

Symbols: P problems, E experts, R source ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits, check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, StepLoad, imbalance
from equilibra.core.model import MoEModel, model_named
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import StepPlan
from equilibra.cost.presets import AUTO, prices_of
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.micro_batch import NO_EXCHANGE, CopyCosts, balance_micro_batches, scratch_for
from equilibra.plan.one_layer import balance
from equilibra.plan.pack import in_order
from equilibra.plan.planner import Planner, StepProblem, planner_named
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import Recording

__all__ = ["plan_step", "step_problem"]


def step_problem(
    routing: Recording | SequenceLoad | StepLoad,
    *,
    cluster: Cluster,
    model: MoEModel | str | None = None,
    tokens_per_rank: int | None = None,
    previous: Placement | None = None,
    history_LE: NDArray[np.int64] | None = None,
    limits: PlanLimits | None = None,
    hardware: str | Prices = AUTO,
) -> StepProblem:
    """The problem of one step. A recording or sequence loads need `tokens_per_rank`, the budget of a micro-batch.

    Without a model, copies and moves are free. hardware: a preset, a file, or prices. auto does not look at the device
    here: it means an H200 on which copies cost no more than their rows.
    """
    model = model_named(model) if isinstance(model, str) else model
    prices, rates = prices_of(hardware), Rates.free()
    if model is not None:
        rates = rates_for(model, prices, num_nodes=cluster.num_nodes)
    load = sequences = schedule = None
    if isinstance(routing, StepLoad):
        load = routing
    else:
        sequences = sequence_loads(routing) if isinstance(routing, Recording) else routing
        if tokens_per_rank is None:
            raise InputError("sequences need tokens_per_rank, the token budget of a rank in a micro-batch")
        if isinstance(tokens_per_rank, np.integer):
            tokens_per_rank = int(tokens_per_rank)
        check_whole("tokens_per_rank", tokens_per_rank, low=1, high=2**40)
        schedule = in_order(sequences.length_of_sequence, cluster, tokens_per_rank=tokens_per_rank)
    problem = StepProblem(
        cluster=cluster, given_load=load, sequences=sequences, schedule=schedule, tokens_per_rank=tokens_per_rank,
        previous=previous, history_LE=history_LE, rates=rates, **(limits or PlanLimits()).limits(),
    )  # fmt: skip
    if model is not None and (problem.load.num_layers, problem.load.num_experts) != (
        model.num_layers, model.num_experts,
    ):  # fmt: skip
        raise InputError(
            f"the routing has {problem.load.num_layers} layers of {problem.load.num_experts} experts, "
            f"{model.name} has {model.num_layers} of {model.num_experts}: name the model it was recorded from"
        )
    return problem


def plan_step(
    routing: Recording | SequenceLoad | StepLoad,
    *,
    cluster: Cluster,
    model: MoEModel | str | None = None,
    tokens_per_rank: int | None = None,
    previous: Placement | None = None,
    spare_slots: int = 2,
    standing_slots: int = 2,
    max_moves_per_layer: int = -1,
    planner: Planner | str = "equilibra",
    hardware: str | Prices = AUTO,
) -> StepPlan:
    """The complete plan of a step from its routing.

    routing: a recording, loads of sequences, or loads of fixed micro-batches. previous: `plan.placement` of the last
    step. hardware: "h200", for example, to level time instead of rows; see `step_problem`.
    """
    limits = PlanLimits(spare_slots=spare_slots, standing_slots=standing_slots, max_moves_per_layer=max_moves_per_layer)
    problem = step_problem(
        routing, cluster=cluster, model=model, tokens_per_rank=tokens_per_rank, previous=previous, limits=limits,
        hardware=hardware,
    )  # fmt: skip
    chosen = planner_named(planner) if isinstance(planner, str) else planner
    return chosen.plan(problem)


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """Balance and time of the solutions of P problems."""

    imbalance_before: NDArray[np.float64]
    """[P] with contiguous homes and no copies"""
    imbalance_after: NDArray[np.float64]
    """[P]"""
    lower_bound: NDArray[np.float64]
    """[P] least imbalance that any flash copies can reach"""
    copies: NDArray[np.int64]
    """[P] flash copies"""
    largest_fan_out: NDArray[np.int64]
    """[P] most copies that one rank sends"""
    solve_us: NDArray[np.float64]
    """[passes, P]"""


def over_sources(load_PE: NDArray[np.integer], num_ranks: int) -> NDArray[np.int32]:
    """[P, E, R] tokens of every expert, split as evenly over source ranks as whole numbers allow."""
    share, rest = np.divmod(load_PE.astype(np.int64), num_ranks)
    turn = np.arange(load_PE.shape[1])[:, None]  # the odd tokens of different experts go to different ranks
    extra = (np.arange(num_ranks) - turn) % num_ranks < rest[:, :, None]
    return (share[:, :, None] + extra).astype(np.int32)


def solve_problems(
    tokens_PER: NDArray[np.int32] | Sequence[NDArray[np.int32]],
    *,
    cluster: Cluster,
    spare_slots: int,
    tolerance: float,
    passes: int = 3,
) -> Solved:
    """Solve and time problems of one layer and micro-batch, with contiguous homes.

    What is timed is the compiled call that a runtime makes. Each pass goes over all problems, so none finds its own
    data in the nearest cache.
    """
    num_ranks, group, num_problems = cluster.num_ranks, cluster.ranks_per_node, len(tokens_PER)
    home = contiguous(cluster, num_layers=1, num_experts=tokens_PER[0].shape[0]).home_of_expert[0]
    before, after = np.zeros((2, num_problems, num_ranks), np.int64)
    num_copies, fan_out = np.zeros((2, num_problems), np.int64)
    for p, tokens_ER in enumerate(tokens_PER):
        done = balance(tokens_ER, cluster=cluster, spare_slots=spare_slots, tolerance=tolerance)
        before[p] = tokens_ER.sum(axis=1, dtype=np.int64).reshape(num_ranks, -1).sum(axis=1)
        after[p] = done.rank_load
        num_copies[p] = done.expert_of_copy.size
        fan_out[p] = np.bincount(home[done.expert_of_copy], minlength=1).max()
    spare_slots = min(spare_slots, home.size)  # as in `balance`
    scratch, costs = scratch_for(cluster, home, spare_slots), CopyCosts(tolerance)
    standing = np.zeros((1, 0, num_ranks), np.int32)
    solve_us = np.zeros((passes, num_problems))
    for one_pass in solve_us:
        for p, tokens_ER in enumerate(tokens_PER):
            start = perf_counter_ns()
            balance_micro_batches(tokens_ER[None, None], 0, scratch, cluster, spare_slots, costs, NO_EXCHANGE, standing)
            one_pass[p] = (perf_counter_ns() - start) / 1000
    node_load = before.reshape(num_problems, cluster.num_nodes, group).sum(axis=2)
    bound = -(-node_load.max(axis=1) // group) if spare_slots else before.max(axis=1)
    mean = np.maximum(before.sum(axis=1) / num_ranks, 1e-300)
    return Solved(
        imbalance_before=imbalance(before),
        imbalance_after=imbalance(after),
        lower_bound=np.where(before.sum(axis=1) > 0, bound / mean, 1.0),
        copies=num_copies,
        largest_fan_out=fan_out,
        solve_us=solve_us,
    )
