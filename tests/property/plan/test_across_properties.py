"""Invariants of the split across nodes over clusters, loads, standing copies, slots and slacks."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equilibra.core.placement import Cluster
from equilibra.plan.across import fill_levels
from equilibra.plan.micro_batch import NO_EXCHANGE
from references.across import Case, check_split, exchanged, fill_by_hand, rank_first, split_of, traffic
from references.splits import most_kept

KINDS = ["zero", "one-hot", "one source", "flat", "skewed", "local", "few", "huge", "huge one-hot"]
many = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def tokens_of_kind(kind: str, rng: np.random.Generator, cluster: Cluster, num_experts: int) -> np.ndarray:
    """[E, R] tokens."""
    num_ranks = cluster.num_ranks
    tokens = np.zeros((num_experts, num_ranks), np.int64)
    if kind in {"one-hot", "huge one-hot"}:
        tokens[int(rng.integers(num_experts))] = rng.integers(0, 500 if kind == "one-hot" else 2**30, num_ranks)
    elif kind == "one source":
        tokens[:, int(rng.integers(num_ranks))] = rng.integers(0, 500, num_experts)
    elif kind == "flat":
        tokens[:] = rng.integers(0, 100)
    elif kind == "skewed":
        tokens[:] = rng.poisson(rng.gamma(0.3, 100, (num_experts, 1)) * rng.gamma(1.0, 1.0, (num_experts, num_ranks)))
    elif kind == "local":  # every node likes its own experts, or the next node's
        node = np.arange(num_experts) * cluster.num_nodes // num_experts
        near = node[:, None] == (cluster.node_of_rank() + rng.integers(2)) % cluster.num_nodes
        tokens[:] = rng.poisson(np.where(near, 200, 5))
    elif kind == "few":
        tokens[:] = rng.integers(0, 2, tokens.shape)
    elif kind == "huge":
        tokens[:] = rng.integers(0, 2**30, tokens.shape)
    return np.ascontiguousarray(tokens, np.int32)


@st.composite
def cases(draw, kinds=tuple(KINDS), largest_node=8, most_nodes=4) -> Case:
    cluster = Cluster(num_nodes=draw(st.integers(2, most_nodes)), ranks_per_node=draw(st.integers(1, largest_node)))
    num_ranks, group = cluster.num_ranks, cluster.ranks_per_node
    per_rank = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = tokens_of_kind(draw(st.sampled_from(kinds)), rng, cluster, num_ranks * per_rank)
    standing = set()
    for _ in range(draw(st.integers(0, 4))):  # hot ones rather than cold ones, on other nodes than their homes
        hot = np.argsort(-tokens.sum(axis=1, dtype=np.int64), kind="stable")
        e = int(hot[min(int(rng.geometric(0.3)) - 1, hot.size - 1)])
        node = (e // per_rank // group + int(rng.integers(1, cluster.num_nodes))) % cluster.num_nodes
        if not any(have == e and r // group == node for have, r in standing):
            standing.add((e, node * group + int(rng.integers(group))))
    return Case(
        tokens_ER=tokens,
        cluster=cluster,
        slots=draw(st.integers(0, 3)),
        tolerance=draw(st.sampled_from([0.0, 0.005, 0.2])),
        min_tokens=draw(st.sampled_from([0, 1, 17, 10**6])),
        row_slack=draw(st.sampled_from([NO_EXCHANGE, 0.0, 0.02, 0.5])),
        standing_expert=[e for e, _ in sorted(standing)],
        standing_rank=[r for _, r in sorted(standing)],
    )


@many
@given(cases())
def test_every_pair_is_served_once_within_quotas_slots_and_nodes(case):
    check_split(split_of(case))


@many
@given(cases())
def test_an_exchange_raises_neither_the_traffic_of_a_node_nor_rows_beyond_the_slack(case):
    group, slack = case.cluster.ranks_per_node, max(case.row_slack, 0.0)
    before = split_of(replace(case, row_slack=NO_EXCHANGE))
    after = exchanged(before, slack)
    check_split(after)
    assert after.rows().max() <= before.rows().max() + int(slack * before.rows().mean())
    was, now = (split.received().reshape(-1, group) for split in (before, after))
    assert (now.max(axis=1) <= was.max(axis=1)).all()
    assert now.sum(axis=1).tolist() == was.sum(axis=1).tolist(), "what a node receives is not the exchange's to change"
    assert before.rows().reshape(-1, group).sum(axis=1).tolist() == after.rows().reshape(-1, group).sum(axis=1).tolist()


@some
@given(cases())
def test_the_same_micro_batch_gives_the_same_split(case):
    first, second = split_of(case), split_of(replace(case, tokens_ER=case.tokens_ER.copy()))
    if case.row_slack == NO_EXCHANGE:
        np.testing.assert_array_equal(exchanged(first, NO_EXCHANGE).served_CR, first.served_CR)
    for name in ("expert_C", "rank_C", "origin_C", "quota_C", "served_CR"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@some
@given(cases(kinds=("skewed", "local", "few", "one-hot"), largest_node=3, most_nodes=3))
def test_no_transport_with_these_quotas_keeps_more_on_its_node(case):
    split = split_of(case)
    group = case.cluster.ranks_per_node
    instances = split.instances()
    for e in range(len(case.tokens_ER)):
        of_expert = [(rank, served) for expert, rank, served in instances if expert == e]
        if len(of_expert) > 1:
            kept = sum(int(v[r // group * group : (r // group + 1) * group].sum()) for r, v in of_expert)
            quotas = [int(v.sum()) for _, v in of_expert]
            ranks = [r for r, _ in of_expert]
            assert kept == most_kept(case.tokens_ER[e].astype(np.int64), ranks, quotas, group, what="node")


@many
@given(cases(kinds=("skewed", "local", "huge")))
def test_rows_and_what_crosses_are_those_of_the_simple_rule(case):
    """The split changes who serves whom, never how much: a slow reference with the same quotas agrees."""
    split = split_of(case)
    rows, received, sent = traffic(rank_first(split), case.cluster)
    assert rows.tolist() == split.rows().tolist()
    group = case.cluster.ranks_per_node
    for simple, ours in ((received, split.received()), (sent, split.sent())):
        assert simple.reshape(-1, group).sum(axis=1).tolist() == ours.reshape(-1, group).sum(axis=1).tolist()


@many
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 5)), min_size=1, max_size=4), st.data())
def test_levels_are_filled_as_by_trying_all_ways(pairs, data):
    level, cap = [a for a, _ in pairs], [b for _, b in pairs]
    total = data.draw(st.integers(0, sum(cap)))
    out = np.zeros(len(level), np.int64)
    fill_levels(np.array(level), np.array(cap), len(level), total, out)
    assert out.min() >= 0
    assert (out <= cap).all()
    assert sorted((np.array(level) + out).tolist(), reverse=True) == fill_by_hand(level, cap, total)
