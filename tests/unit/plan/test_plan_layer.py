"""What a layer's choice costs is what its slowest ranks and busiest links take, counted one by one."""

import numpy as np
import pytest

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import Stage, StandingCopies, StepPlan
from equilibra.cost.rates import Rates
from equilibra.plan.layer import choose, fill, real_cost_us
from equilibra.plan.micro_batch import CopyCosts
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra, _on_ranks
from references.step_cost import busiest_link, prices_us, rank_rows


def by_stage(logprob, update):
    return {Stage.LOGPROB: logprob, Stage.UPDATE: update}


RATES = Rates(
    row_us=by_stage(1.0, 3.0), cross_row_us=0.5, flash_copy_us=by_stage(20.0, 45.0), standing_copy_us=7.0,
    exposed_share=0.2, link_us=by_stage(90.0, 200.0), gap_us=by_stage(5.0, 9.0), gap_row_us=by_stage(0.25, 0.5),
    hold_us=by_stage(2.0, 11.0), serve_us=by_stage(1.0, 6.0),
)  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_cost_is_counted_rank_by_rank(shape, seed):
    cluster, rng = Cluster(num_nodes=shape[0], ranks_per_node=shape[1]), np.random.default_rng(seed)
    load = StepLoad(
        tokens_MLER=(rng.integers(0, 40, (3, 1, 12, 4)) // rng.integers(1, 9, (1, 1, 12, 1))).astype(np.int32)
    )
    problem = StepProblem(
        cluster=cluster, given_load=load, rates=RATES, spare_slots=2, standing_slots=2 * (shape[0] > 1),
        previous=contiguous(cluster, num_layers=1, num_experts=12),
    )  # fmt: skip
    planner = Equilibra(threads=1)
    layer = planner._layers(problem, load)[0]
    choice = choose(layer)
    ranks = _on_ranks([choice], load, cluster)[0]
    copies = {stage: fill(layer, choice, ranks, CopyCosts(0.0, 2, 1, 1, 16), RATES.row_slack) for stage in Stage}
    standing = StandingCopies(
        layer=np.zeros(ranks.size, np.int32), expert=choice.standing_expert.astype(np.int32),
        rank=ranks.astype(np.int32),
    )  # fmt: skip
    plan = StepPlan(
        planner="", placement=Placement(cluster=cluster, home_of_expert=choice.home_of_expert[None]),
        previous=problem.home_now, standing=standing, stages=copies, bound_LM=load.lower_bound(), schedule=None,
    )  # fmt: skip
    assert copies[Stage.UPDATE].expert.size > 0
    wanted = choice.traffic_us + choice.moving_us
    for stage in Stage:
        copies_us = prices_us(plan, load, stage, RATES)
        for (_, m), rows in rank_rows(plan, load, stage).items():
            slowest = max(r * RATES.row_us[stage] + us for r, us in zip(rows, copies_us[0, m], strict=True))
            hidden = slowest + RATES.gap_us[stage] + RATES.gap_row_us[stage] * sum(rows) / len(rows)
            busiest = busiest_link(plan, stage, m)
            exposed = busiest * RATES.exposed_share * RATES.flash_copy_us[stage]
            wanted += slowest + max(exposed, busiest * RATES.link_us[stage] - hidden)
    assert real_cost_us(layer, choice, ranks, copies) == pytest.approx(wanted)


def test_nodes_that_are_even_to_a_two_thousandth_get_no_standing_copies():
    def standing(first):
        tokens = np.full((1, 1, 8, 4), 2500, np.int32)
        tokens[0, 0, 0, 0] += first
        problem = StepProblem(
            cluster=Cluster(num_nodes=2, ranks_per_node=2), given_load=StepLoad(tokens_MLER=tokens), rates=Rates.free(),
            spare_slots=2, standing_slots=2,
        )  # fmt: skip
        return Equilibra(threads=1, reorder=False).plan(problem).standing.num_copies

    assert standing(30) == 0  # of 40,000 rows of a node
    assert standing(400) > 0
