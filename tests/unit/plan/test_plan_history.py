"""What standing copies of a past plan take of a later step, token by token."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.plan.history import SCALE, rank_load_by_shares, shares_of
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra

CLUSTER = Cluster(num_nodes=3, ranks_per_node=2)


def load_of(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60, (2, 2, 12, 6))
    tokens[:, :, 0] *= 60
    return StepLoad(tokens_MLER=tokens.astype(np.int32))


def planned(load, **changes):
    problem = StepProblem(
        cluster=CLUSTER, given_load=load, rates=Rates.free(), standing_slots=2, **({"spare_slots": 0} | changes)
    )
    return Equilibra(threads=1, reorder=False).plan(problem)


def test_later_loads_are_shared_as_the_past_one_was():
    past, later = load_of(0), load_of(1)
    plan = planned(past)
    shares_CR = shares_of(plan, past)
    standing = plan.standing
    of_expert = np.unique(np.stack([standing.layer, standing.expert]), axis=1, return_counts=True)[1]
    assert of_expert.max() > 1, "several copies of one expert take their shares one after another"
    wanted = np.zeros((2, 2, 6), np.int64)
    for layer in range(2):
        for m in range(2):
            for e in range(12):
                home = plan.placement.home_of_expert[layer, e]
                copies = [
                    c for c in range(standing.num_copies) if (standing.layer[c], standing.expert[c]) == (layer, e)
                ]
                for r in range(6):
                    left = count = int(later.tokens_MLER[m, layer, e, r])
                    upto = 0
                    for c in copies:
                        begin, upto = upto, upto + int(shares_CR[c, r])
                        taken = count * upto // SCALE - count * begin // SCALE
                        wanted[layer, m, standing.rank[c]] += taken
                        left -= taken
                    assert left >= 0
                    wanted[layer, m, home] += left
    found = rank_load_by_shares(later, plan, shares_CR)
    assert found.tolist() == wanted.tolist()
    static = rank_load_by_shares(later, plan, np.zeros_like(shares_CR))
    assert found.max() < static.max(), "what was skewed before still is"


def test_shares_are_those_of_the_plan():
    past = load_of(0)
    plan = planned(past)
    found = rank_load_by_shares(past, plan, shares_of(plan, past)).sum(axis=1)
    wanted = plan.rank_load(past, Stage.UPDATE)
    wanted = wanted.reshape(2, 2, 6).sum(axis=1)
    assert np.abs(found - wanted).max() <= 2 * 12 * 6, "rounded down for every expert, source and micro-batch"
    idle = replace(past, tokens_MLER=past.tokens_MLER * 0)
    assert rank_load_by_shares(idle, plan, shares_of(plan, past)).sum() == 0


def test_flash_copies_are_no_history():
    past = load_of(0)
    with pytest.raises(InputError, match="plan with spare_slots=0"):
        shares_of(planned(past, spare_slots=2), past)
