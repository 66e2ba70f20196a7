"""EPLB, DeepSeek's expert-parallel load balancer: redundant experts for a whole step, from known or past loads.

Symbols: L layers, E experts, P replicas (all instances), N nodes, G expert groups, R ranks, C standing copies.

Per layer: pack expert groups onto nodes (heaviest first, equally many each), give each extra replica of a node to the
expert with the largest load per replica, pack the node's replicas onto its ranks. Where groups do not divide over
nodes, the cluster counts as one node with one group. An expert's tokens are split equally over its replicas.

A rank has E/R + spare_slots replicas per layer: L times the memory of flash copies. Replicas on one rank are one
instance. The home stays where it was if a replica is there, else on its node, else at the first replica, so homes per
rank may be uneven; the other instances are standing copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.kernel import kernel
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import StandingCopies, StepPlan
from equilibra.plan.baselines.assemble import no_flash_copies, step_plan
from equilibra.plan.baselines.longest_first import batch_total, pack_evenly
from equilibra.plan.planner import StepProblem, Timing

__all__ = ["Eplb", "eplb_replicas", "split_by_replicas"]


@dataclass(frozen=True, kw_only=True)
class Eplb:
    """Redundant experts from the batch total of the coming step, or from history."""

    timing: ClassVar[Timing] = Timing.FIXED

    name: str = "eplb-oracle"
    oracle: bool = True
    """use the loads of the coming step; otherwise problem.history_LE"""
    num_groups: int = 1
    """expert groups that should share a node, if the router works by groups"""

    @classmethod
    def from_history(cls) -> Eplb:
        """EPLB with the previous step's loads, as where loads are not known ahead."""
        return cls(name="eplb-history", oracle=False)

    def plan(self, problem: StepProblem) -> StepPlan:
        """Replicas from the loads; without history, the static plan."""
        load_LE = batch_total(problem) if self.oracle else problem.history_LE
        if load_LE is None:
            return step_plan(problem, self.name, no_flash_copies(problem))
        load, cluster = problem.load, problem.cluster
        if load_LE.shape != (load.num_layers, load.num_experts):
            raise InputError(f"history_LE is {load_LE.shape}, but the step needs {load.num_layers, load.num_experts}")
        expert_LP = eplb_replicas(
            load_LE,
            num_replicas=load.num_experts + problem.spare_slots * cluster.num_ranks,
            num_groups=self.num_groups,
            num_nodes=cluster.num_nodes,
            num_ranks=cluster.num_ranks,
        )
        replicas_LER = _replicas_on_ranks(expert_LP, load.num_experts, cluster.num_ranks)
        home, standing = _instances(replicas_LER, problem.home_now)
        stage = no_flash_copies(problem, split_by_replicas(load, home, standing, replicas_LER))
        return step_plan(problem, self.name, stage, home_of_expert=home, standing=standing)


def eplb_replicas(
    load_LE: NDArray[np.integer], *, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    """[L, P] the expert of every replica; replica p is on rank p // (P / R)."""
    num_experts = load_LE.shape[1]
    if num_groups < 1 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    if num_experts % num_groups or num_ranks % num_nodes or num_replicas % num_ranks or num_replicas < num_experts:
        raise InputError(
            f"cannot place {num_replicas} replicas of {num_experts} experts in {num_groups} groups on {num_ranks} "
            f"ranks of {num_nodes} nodes: replicas must be a multiple of ranks and at least as many as experts, ranks "
            f"a multiple of nodes, experts a multiple of groups"
        )
    return np.stack([_layer_replicas(load, num_replicas, num_groups, num_nodes, num_ranks) for load in load_LE])


def _layer_replicas(
    load: NDArray[np.integer], num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    expert_of_group = np.arange(load.size).reshape(num_groups, -1)
    group_of_node = pack_evenly(load[expert_of_group].sum(axis=1).astype(np.float64), num_nodes)
    expert_of_replica = []
    for groups in group_of_node:
        expert = expert_of_group[groups].ravel()
        weight = load[expert].astype(np.float64)
        member, share = _replicate(weight, num_replicas // num_nodes)
        expert_of_replica.append(expert[member[pack_evenly(share, num_ranks // num_nodes)]].ravel())
    return np.concatenate(expert_of_replica)


@kernel
def _replicate(weight, num_replicas):  # type: ignore[no-untyped-def]
    """The member each replica is of, and its share of the weight: one each, extras to the largest share."""
    member = np.arange(num_replicas)
    count = np.ones(weight.size, np.int64)
    for p in range(weight.size, num_replicas):
        member[p] = np.argmax(weight / count)
        count[member[p]] += 1
    return member, (weight / count)[member]


def _replicas_on_ranks(expert_LP: NDArray[np.int64], num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """[L, E, R] replicas of each expert on each rank."""
    num_layers, num_replicas = expert_LP.shape
    rank = np.arange(num_replicas) // (num_replicas // num_ranks)
    entry_LP = (np.arange(num_layers)[:, None] * num_experts + expert_LP) * num_ranks + rank
    count = np.bincount(entry_LP.ravel(), minlength=num_layers * num_experts * num_ranks)
    return count.reshape(num_layers, num_experts, num_ranks)


def _instances(replicas_LER: NDArray[np.int64], before: Placement) -> tuple[NDArray[np.int32], StandingCopies]:
    """One instance per rank that has a replica: one of them the home, the others standing copies."""
    node_of_rank = before.cluster.node_of_rank()
    has_LER = replicas_LER > 0
    score_LER = has_LER.astype(np.int8)
    was = before.home_of_expert[:, :, None]
    score_LER[has_LER & (node_of_rank == node_of_rank[was])] = 2
    score_LER[has_LER & (np.arange(node_of_rank.size) == was)] = 3
    home = score_LER.argmax(axis=2).astype(np.int32)
    np.put_along_axis(has_LER, home[:, :, None], values=False, axis=2)
    layer, expert, rank = (index.astype(np.int32) for index in np.nonzero(has_LER))
    return home, StandingCopies(layer=layer, expert=expert, rank=rank)


def split_by_replicas(
    load: StepLoad, home_LE: NDArray[np.int32], standing: StandingCopies, replicas_LER: NDArray[np.int64]
) -> NDArray[np.int32]:
    """[C, M, R] tokens of each copy: an expert's tokens go to its replicas in turn, so they differ by at most one."""
    layer, expert = standing.layer, standing.expert
    own = replicas_LER[layer, expert, standing.rank]
    key = layer.astype(np.int64) * load.num_experts + expert
    before = np.cumsum(own) - own
    before += (
        replicas_LER[layer, expert, home_LE[layer, expert]] - before[np.searchsorted(key, key)]
    )  # the home is first
    own_C11, before_C11 = own[:, None, None], before[:, None, None]
    every_C11 = replicas_LER[layer, expert].sum(axis=1)[:, None, None]
    upto_CMR = load.tokens_MLER[:, layer, expert].astype(np.int64).cumsum(axis=2).transpose(1, 0, 2)
    rounds, rest = np.divmod(upto_CMR, every_C11)
    served_CMR = rounds * own_C11 + np.clip(rest - before_C11, 0, own_C11)
    tokens: NDArray[np.int32] = np.diff(served_CMR, axis=2, prepend=0).astype(np.int32)
    return np.ascontiguousarray(tokens)
