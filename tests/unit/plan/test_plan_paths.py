"""Stages whose copies would be late over one link."""

from dataclasses import replace

import numpy as np

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra, late_stages

CLUSTER = Cluster(num_nodes=1, ranks_per_node=4)


def planned():
    tokens = np.random.default_rng(0).integers(0, 40, (2, 3, 8, 4)).astype(np.int32)
    tokens[:, :, 0] += 400
    load = StepLoad(tokens_MLER=tokens)
    plan = Equilibra().plan(StepProblem(cluster=CLUSTER, given_load=load, rates=Rates.free(), spare_slots=2))
    assert all(stage.num_copies for stage in plan.stages.values())
    return plan, load


def slowest_link(plan, load, stage):
    """Longest (copies of a link, rows of the slowest rank), one layer and micro-batch at a time."""
    copies, rows = plan.stages[stage], plan.rank_load(load, stage).reshape(-1, 4)
    first = copies.first_of_problem
    return [
        (max(max((part == rank).sum() for rank in range(4))
             for part in (copies.rank[first[i] : first[i + 1]], copies.origin[first[i] : first[i + 1]])), rows[i])
        for i in range(len(rows))
    ]  # fmt: skip


def test_a_stage_is_late_when_its_links_are_by_a_hundredth_of_its_layers():
    plan, load = planned()
    gaps = {Stage.LOGPROB: 5.0, Stage.UPDATE: 9.0}
    base = replace(Rates.free(), gap_us=gaps, gap_row_us=dict.fromkeys(Stage, 0.25))
    for stage in Stage:
        cells = [(n, rows.max() + 0.25 * rows.mean() + gaps[stage]) for n, rows in slowest_link(plan, load, stage)]
        found = set()
        for link_us in np.linspace(1.0, 2000.0, 200):
            late_us = sum(max(n * link_us - us, 0.0) for n, us in cells)
            late = late_us > 0.01 * sum(us for _, us in cells)
            rates = replace(base, link_us={**dict.fromkeys(Stage, 0.0), stage: float(link_us)})
            assert late_stages(plan, load, rates) == ({stage} if late else set())
            found.add(late)
        assert found == {False, True}


def test_without_prices_nothing_is_late():
    assert late_stages(*planned(), Rates.free()) == frozenset()
