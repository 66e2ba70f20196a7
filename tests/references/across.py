"""One micro-batch on several nodes, slowly: run the kernel, check what it returns, count traffic, compare with others.

An instance is (expert, rank, tokens it serves by source); homes are instances too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from equilibra.core.placement import Cluster, contiguous
from equilibra.plan.across import serve_across
from equilibra.plan.micro_batch import (
    EXPERT,
    NO_EXCHANGE,
    ORIGIN,
    QUOTA,
    TARGET,
    TRIES,
    CopyCosts,
    balance_micro_batches,
    scratch_for,
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A micro-batch to be balanced."""

    tokens_ER: NDArray[np.int32]
    cluster: Cluster
    slots: int = 2
    tolerance: float = 0.005
    min_tokens: int = 0
    row_slack: float = NO_EXCHANGE
    standing_expert: Sequence[int] = ()
    standing_rank: Sequence[int] = ()
    hold: int = 0
    serve: int = 0

    @property
    def home(self) -> NDArray[np.int32]:
        return contiguous(self.cluster, num_layers=1, num_experts=len(self.tokens_ER)).home_of_expert[0]


@dataclass(frozen=True, kw_only=True)
class Split:
    """What the kernel wrote: copies, standing ones first, and whom they serve."""

    case: Case
    expert_C: Ints
    rank_C: Ints
    origin_C: Ints
    quota_C: Ints
    served_CR: Ints
    beyond: NDArray[np.int32] = field(repr=False)
    """rows of `out` that belong to no copy"""

    @property
    def num_flash(self) -> int:
        return self.expert_C.size - len(self.case.standing_expert)

    def instances(self) -> list[tuple[int, int, Ints]]:
        """Copies, then homes, which serve all that is left."""
        left = self.case.tokens_ER.astype(np.int64)
        for c in range(self.expert_C.size):
            left[self.expert_C[c]] -= self.served_CR[c]
        copies = [
            (int(e), int(r), served) for e, r, served in zip(self.expert_C, self.rank_C, self.served_CR, strict=True)
        ]
        return copies + [(e, int(r), left[e]) for e, r in enumerate(self.case.home)]

    def rows(self) -> Ints:
        """[R] pairs that each rank computes."""
        return traffic(self.instances(), self.case.cluster)[0]

    def effective(self) -> Ints:
        """[R] the same with what copies cost: those a rank holds and those it serves."""
        rows, num_standing = self.rows().copy(), len(self.case.standing_expert)
        for c, (rank, origin, quota) in enumerate(zip(self.rank_C, self.origin_C, self.quota_C, strict=True)):
            rows[rank] += self.case.hold * (quota > 0)
            rows[origin] += self.case.serve * (c >= num_standing)
        return rows

    def received(self) -> Ints:
        """[R] of them, from other nodes."""
        return traffic(self.instances(), self.case.cluster)[1]

    def sent(self) -> Ints:
        """[R] pairs that each rank sends to other nodes."""
        return traffic(self.instances(), self.case.cluster)[2]


def split_of(case: Case) -> Split:
    """Run the kernel."""
    cluster, num_standing = case.cluster, len(case.standing_expert)
    num_ranks = cluster.num_ranks
    standing_expert, standing_rank = np.array(case.standing_expert, np.int64), np.array(case.standing_rank, np.int64)
    scratch = scratch_for(cluster, case.home, case.slots, standing_expert, standing_rank)
    standing = np.zeros((1, num_standing, num_ranks), np.int32)
    costs = CopyCosts(case.tolerance, case.hold, case.serve, case.min_tokens, TRIES)
    _, copies, served = balance_micro_batches(
        case.tokens_ER[None, None], 0, scratch, cluster, case.slots, costs, case.row_slack, standing
    )
    return Split(
        case=case,
        expert_C=np.concatenate([standing_expert, copies[EXPERT]]),
        rank_C=np.concatenate([standing_rank, copies[TARGET]]),
        origin_C=np.concatenate([standing_rank, copies[ORIGIN]]),
        quota_C=np.concatenate([standing[0].sum(axis=1, dtype=np.int64), copies[QUOTA]]),
        served_CR=np.concatenate([standing[0], served]).astype(np.int64),
        beyond=served.base[len(served) :],
    )


def exchanged(split: Split, row_slack: float) -> Split:
    """The same copies served again, exchanging rows where row_slack allows it."""
    case, num_ranks = split.case, split.case.cluster.num_ranks
    num_standing, count = len(case.standing_expert), split.expert_C.size
    copies = np.zeros((4, num_standing + num_ranks * case.slots + 1), np.int64)
    copies[:, :count] = split.expert_C, split.rank_C, split.quota_C, split.origin_C
    standing = np.zeros((num_standing, num_ranks), np.int32)
    out = np.zeros((num_ranks * case.slots + 1, num_ranks), np.int32)
    count = serve_across(
        case.tokens_ER, case.tokens_ER.sum(axis=1, dtype=np.int64), case.home.astype(np.int64),
        case.cluster.ranks_per_node, case.slots, case.tolerance, case.hold, case.serve, case.min_tokens, row_slack,
        num_standing, count, *copies, standing, out,
    )  # fmt: skip
    expert, rank, quota, origin = copies[:, :count]
    n = count - num_standing
    return Split(
        case=case, expert_C=expert, rank_C=rank, origin_C=origin, quota_C=quota,
        served_CR=np.concatenate([standing, out[:n]]).astype(np.int64), beyond=out[n:],
    )  # fmt: skip


def check_split(split: Split) -> None:
    """Whatever must hold for any load: AssertionError otherwise."""
    case, group = split.case, split.case.cluster.ranks_per_node
    num_standing = len(case.standing_expert)
    instances = split.instances()
    assert min(int(served.min()) for _, _, served in instances) >= 0, "a pair is served twice"
    assert sum(int(served.sum()) for _, _, served in instances) == int(case.tokens_ER.sum(dtype=np.int64))
    assert len({(e, r) for e, r, _ in instances}) == len(instances), "a rank has an expert twice"
    assert (split.served_CR.sum(axis=1) == split.quota_C).all(), "a quota is not kept"
    assert not split.beyond.any(), "rows that the next micro-batch will use must be left at zero"
    flash = slice(num_standing, None)
    assert (split.quota_C[flash] > 0).all(), "a flash copy that serves nobody"
    assert (split.rank_C[flash] // group == split.origin_C[flash] // group).all(), "a flash copy left its node"
    used = np.bincount(split.rank_C[flash], minlength=case.cluster.num_ranks)
    assert used.max() <= case.slots, f"{used.tolist()} slots"
    for c in range(num_standing, split.expert_C.size):
        on = [int(case.home[split.expert_C[c]])]
        on += [r for e, r in zip(case.standing_expert, case.standing_rank, strict=True) if e == split.expert_C[c]]
        assert split.origin_C[c] in on, "a flash copy comes from where no instance is"
    kept = most_kept_on_nodes(case.tokens_ER, instances, group)
    assert int(split.received().sum()) == int(case.tokens_ER.sum(dtype=np.int64)) - kept, "more could stay on its node"


def most_kept_on_nodes(tokens_ER: NDArray[np.integer], instances: list[tuple[int, int, Ints]], group: int) -> int:
    """Tokens that stay on their node at best: per expert and node, what it has or what its instances take."""
    num_experts, num_ranks = tokens_ER.shape
    quota = np.zeros((num_experts, num_ranks // group), np.int64)
    for e, r, served in instances:
        quota[e, r // group] += served.sum()
    own = tokens_ER.reshape(num_experts, -1, group).sum(axis=2, dtype=np.int64)
    return int(np.minimum(own, quota).sum())


def traffic(instances: list[tuple[int, int, Ints]], cluster: Cluster) -> tuple[Ints, Ints, Ints]:
    """Rows computed, received from other nodes, and sent to other nodes, by rank."""
    rows, received, sent = np.zeros((3, cluster.num_ranks), np.int64)
    group = cluster.ranks_per_node
    for _, rank, served in instances:
        for source in range(cluster.num_ranks):
            rows[rank] += served[source]
            if source // group != rank // group:
                received[rank] += served[source]
                sent[source] += served[source]
    return rows, received, sent


def rank_first(split: Split) -> list[tuple[int, int, Ints]]:
    """The same instances and quotas by the simple rule: tokens of the own rank first, then of the node, then others."""
    group, num_ranks = split.case.cluster.ranks_per_node, split.case.cluster.num_ranks
    before = split.instances()
    result = [(e, r, np.zeros(num_ranks, np.int64)) for e, r, _ in before]
    need = [int(served.sum()) for _, _, served in before]
    left = split.case.tokens_ER.astype(np.int64)
    for near in range(3):
        for i, (e, rank, served) in sorted(enumerate(result), key=lambda item: item[1][1]):
            for source in range(num_ranks):
                if (source == rank, source // group == rank // group, True)[near]:
                    some = min(int(left[e, source]), need[i])
                    left[e, source] -= some
                    served[source] += some
                    need[i] -= some
    assert not any(need)
    assert not left.any()
    return result


def least_received(split: Split) -> float:
    """The largest received traffic of any split with these quotas, at best: a linear program over all transports."""
    instances, tokens = split.instances(), split.case.tokens_ER
    num_experts, num_ranks = tokens.shape
    group = split.case.cluster.ranks_per_node
    num = len(instances) * num_ranks  # x[instance, source], then the largest
    equal, equals = [], []
    for i, (_, _, served) in enumerate(instances):
        row = np.zeros(num + 1)
        row[i * num_ranks : (i + 1) * num_ranks] = 1
        equal.append(row)
        equals.append(int(served.sum()))
    for e, source in product(range(num_experts), range(num_ranks)):
        row = np.zeros(num + 1)
        row[[i * num_ranks + source for i, (of, _, _) in enumerate(instances) if of == e]] = 1
        equal.append(row)
        equals.append(int(tokens[e, source]))
    above = np.zeros((num_ranks, num + 1))
    above[:, -1] = -1
    for i, (_, rank, _) in enumerate(instances):
        for source in range(num_ranks):
            if source // group != rank // group:
                above[rank, i * num_ranks + source] = 1
    price = np.zeros(num + 1)
    price[-1] = 1
    solved = linprog(
        price, A_ub=above, b_ub=np.zeros(num_ranks), A_eq=np.array(equal), b_eq=np.array(equals), method="highs"
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)


def fill_by_hand(level: Sequence[int], cap: Sequence[int], total: int) -> list[int]:
    """Every way to hand out `total` in whole numbers up to the caps: the levels, highest first, of the lowest one."""
    ways = (out for out in product(*(range(c + 1) for c in cap)) if sum(out) == total)
    return min(sorted((a + b for a, b in zip(level, out, strict=True)), reverse=True) for out in ways)
