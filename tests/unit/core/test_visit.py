"""Tables against a plain loop: every pair has one row, sizes agree on both sides, quotas hold."""

import numpy as np
import pytest

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.core.visit import VisitKey, only_homes
from equilibra.plan.entry import plan_step


def routing(rng, num_ranks, num_experts, top_k):
    """Experts [T, K] of every rank, skewed."""
    skew = np.log(rng.dirichlet(np.full(num_experts, 0.3)) + 1e-9)
    return [
        np.argsort(-(skew + rng.gumbel(size=(rng.integers(0, 60), num_experts))), axis=1)[:, :top_k].astype(np.int64)
        for _ in range(num_ranks)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_pair_has_one_row_where_both_sides_expect_it(seed):
    rng = np.random.default_rng(seed)
    cluster = Cluster(num_nodes=int(rng.integers(1, 3)), ranks_per_node=int(rng.integers(1, 4)))
    num_ranks, per_rank = cluster.num_ranks, int(rng.integers(1, 4))
    num_experts = per_rank * num_ranks
    top_k = int(rng.integers(1, num_experts + 1))
    experts_of_rank = routing(rng, num_ranks, num_experts, top_k)
    counts = np.stack([np.bincount(ids.ravel(), minlength=num_experts) for ids in experts_of_rank], axis=1)
    load = StepLoad(tokens_MLER=np.ascontiguousarray(counts[None, None]).astype(np.int32))
    plan = plan_step(load, cluster=cluster)
    visit = plan.visit(Stage.UPDATE, 0, 0)
    sent = [visit.send_table(ids, rank) for rank, ids in enumerate(experts_of_rank)]
    for rank in range(num_ranks):
        table, ids = sent[rank], experts_of_rank[rank]
        assert sorted(table.row_of_pair.ravel().tolist()) == list(range(ids.size))
        tokens = np.repeat(np.arange(len(ids)), top_k)
        assert np.array_equal(table.token_of_row[table.row_of_pair.ravel()], tokens)
    for rank in range(num_ranks):
        mine = visit.on_rank(rank)
        counts_IR = visit.counts(load, rank)
        told = np.stack([table.counts_RE[rank, mine] for table in sent], axis=1)
        assert np.array_equal(told, counts_IR), "a source sends what the plan says"
        table = visit.receive_table(rank, counts_IR)
        order = table.received_of_grouped
        assert np.array_equal(np.argsort(order), table.grouped_of_received)
        received = np.concatenate(
            [np.repeat(np.arange(num_experts), sent[s].counts_RE[rank]) for s in range(num_ranks)]
        )
        assert np.array_equal(received[order], np.repeat(mine, counts_IR.sum(axis=1)))
    assert sum(int(table.counts_RE.sum()) for table in sent) == counts.sum()


def test_more_pairs_than_planned_go_home_and_fewer_leave_copies_idle():
    cluster = Cluster(num_nodes=1, ranks_per_node=2)
    load = StepLoad(tokens_MLER=np.array([[[[40, 0], [0, 0]]]], np.int32))
    plan = plan_step(load, cluster=cluster)
    visit = plan.visit(Stage.UPDATE, 0, 0)
    assert visit.flash_expert.tolist() == [0], "the control needs a copy"
    quota = int(visit.flash_tokens_FR[0, 0])
    more = visit.send_table(np.zeros((50, 1), np.int16), 0)
    assert more.counts_RE[:, 0].tolist() == [50 - quota, quota]
    fewer = visit.send_table(np.zeros((3, 1), np.int16), 0)
    assert fewer.counts_RE[:, 0].tolist() == [0, 3]


def test_without_a_plan_all_go_home():
    plan = plan_step(
        StepLoad(tokens_MLER=np.ones((1, 1, 4, 2), np.int32)), cluster=Cluster(num_nodes=1, ranks_per_node=2)
    )
    table = only_homes(plan.placement, VisitKey.once(0)).send_table(np.array([[3, 0], [1, 2]]), 0)
    assert table.counts_RE.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert table.token_of_row.tolist() == [0, 1, 1, 0]
