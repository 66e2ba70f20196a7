"""Plan a step in one call, for scripts and other runtimes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.core.model import MoEModel, model_named
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import StepPlan
from equilibra.cost.presets import AUTO, prices_of
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for
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
    rates = Rates.free()
    if model is not None:
        rates = rates_for(model, prices_of(hardware), num_nodes=cluster.num_nodes)
    load = sequences = schedule = None
    if isinstance(routing, StepLoad):
        load = routing
    else:
        sequences = sequence_loads(routing) if isinstance(routing, Recording) else routing
        if tokens_per_rank is None:
            raise InputError("sequences need tokens_per_rank, the token budget of a rank in a micro-batch")
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
