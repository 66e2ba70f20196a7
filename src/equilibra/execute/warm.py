"""Compile or load the code of a step once, in the process that ranks are forked from, instead of in every rank.

Plans a made-up step and makes its tables. No thread is left behind, so the process may be forked.
"""

from __future__ import annotations

import numpy as np

from equilibra.core.cluster import Cluster
from equilibra.core.load import step_load
from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.kernels.shares import launches_of
from equilibra.execute.steps.counts import recorded_experts
from equilibra.execute.steps.planning import own_schedule
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import RoutingTrace

__all__ = ["warm"]

SEQUENCES, TOKENS, LAYERS, EXPERTS, TOP_K = 32, 12, 2, 8, 2


def warm(num_nodes: int) -> None:
    """Plan a step on so many nodes (more than two need the code of two), make tables, share out a launch's tiles."""
    random = np.random.default_rng(0)
    popular = random.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (SEQUENCES * TOKENS * LAYERS, 1)), axis=1)
    ids = np.where(popular[:, :TOP_K] > 3, popular[:, :TOP_K] - 3, popular[:, :TOP_K])
    ids[:, 1] = (ids[:, 0] + 1) % EXPERTS
    trace = RoutingTrace(
        ids=ids.reshape(-1, LAYERS, TOP_K), offsets=np.arange(SEQUENCES + 1, dtype=np.int64) * TOKENS,
        num_experts=EXPERTS,
    )  # fmt: skip
    nodes = min(num_nodes, 2)
    cluster = Cluster(num_nodes=nodes, ranks_per_node=4 // nodes)
    loads = sequence_loads(trace)
    mini_batches = np.arange(SEQUENCES) % 2
    owner = np.repeat(np.arange(4), SEQUENCES // 4)
    own = own_schedule(loads.length_of_sequence, owner, mini_batches, num_ranks=4, tokens_per_rank=4 * TOKENS)
    problem = StepProblem(
        cluster=cluster, sequences=loads, schedule=own.schedule, tokens_per_rank=4 * TOKENS,
        mini_batch_of_sequence=mini_batches, spare_slots=2, standing_slots=2, rates=Rates.free(),
        previous=contiguous(cluster, num_layers=LAYERS, num_experts=EXPERTS),
    )  # fmt: skip
    plan = Equilibra(threads=1).plan(problem)
    assert plan.schedule is not None
    load = step_load(loads, plan.schedule, cluster)
    visit = plan.visit(Stage.UPDATE, 0, 0)
    visit.send_table(recorded_experts(trace)[:TOKENS, 0], 0)
    visit.receive_table(0, visit.counts(load, 0))
    launches_of(np.array([40, 9]), np.array([4, 6]), 20, 32, 200, 100, 60, 3)
