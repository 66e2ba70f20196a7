"""Settings and slots of integrations that run plans inside another framework. No torch.

Symbols: L layers, R ranks, E experts, H home slots of a rank, S copy slots of a rank, P = R (H + S) slots of all ranks.

Frameworks number experts by their position on a rank. Here slots take that role: rank r has slots r (H + S) and on,
homes first, then copies. An expert that moves takes the slot of one that leaves, so the parameters, gradient buckets
and optimizer shards of the others do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_choice, check_flag, check_number, check_whole
from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.core.placement import Migration, Placement
from equilibra.core.visit import CopyList, Visit
from equilibra.plan.setting import PlannerSetting

__all__ = [
    "HomeMove", "HomeSlots", "MegatronSetting", "PlanSetting", "SlotTable", "cluster_of", "contiguous_slots",
    "slot_table",
]  # fmt: skip

RANKS_PER_NODE = 8
ALL = np.int64(2**62)
"""more pairs than a rank can have"""


@dataclass(frozen=True, kw_only=True)
class PlanSetting(PlannerSetting):
    """How steps are planned inside another framework; the same on every rank."""

    standing_slots: int = 0
    """must be 0: standing copies are not supported here"""
    max_moves_per_layer: int = 0
    """must be 0 where the framework cannot move homes"""
    ranks_per_node: int | None = None
    """expert-parallel ranks that share fast links; None: 8, or all if there are fewer"""
    timeout_s: float = 300.0
    """seconds until a silent rank counts as lost, in exchanges of counts, hashes and copies"""

    homes_move: ClassVar[bool] = False
    """whether the framework can move homes"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("standing_slots",) if self.homes_move else ("standing_slots", "max_moves_per_layer"):
            if getattr(self, name):
                raise InputError(f"{self.section}{name} must be 0 inside this framework, not {getattr(self, name)}")
        if self.ranks_per_node is not None:
            check_whole(f"{self.section}ranks_per_node", self.ranks_per_node, low=1, high=2**16 - 1)
        check_number(f"{self.section}timeout_s", self.timeout_s, above=0, high=1e6, below=True)

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{self.chosen_planner.name}, {self.spare_slots} spare slots, nodes of {cluster.ranks_per_node}, "
            f"seed {self.seed}, {self.prices_hash()}"
        )


def cluster_of(num_ranks: int, ranks_per_node: int | None) -> Cluster:
    """The cluster of an expert-parallel group. ranks_per_node: None for 8, or all ranks if there are fewer."""
    per_node = min(RANKS_PER_NODE, num_ranks) if ranks_per_node is None else ranks_per_node
    if num_ranks % per_node:
        raise InputError(f"{num_ranks} expert-parallel ranks cannot be nodes of {per_node}: set ranks_per_node")
    return Cluster(num_nodes=num_ranks // per_node, ranks_per_node=per_node)


@dataclass(frozen=True, kw_only=True)
class MegatronSetting(PlanSetting):
    """How steps are planned inside Megatron-Core; the same on every rank."""

    homes_move: ClassVar[bool] = True

    max_moves_per_layer: int = -1
    """homes that may move per layer and step; -1: as many as pay. Without an optimizer none move"""
    mode: str = "replay"
    """replay: steps are planned ahead, from recorded routing. live: every forward of a layer is planned from what its
    router has just chosen, and its copies are fetched then; for training without routing replay"""
    prefetch: bool = True
    """fetch copies while the previous layer computes; takes the memory of up to two more layers of copies"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.section}mode", self.mode, ("replay", "live"))
        check_flag(f"{self.section}prefetch", self.prefetch)

    def description(self, cluster: Cluster) -> str:
        """What must be the same on every rank, in words."""
        return (
            f"{super().description(cluster)}, {self.mode}, {self.max_moves_per_layer} moves, "
            f"copies fetched {'ahead' if self.prefetch else 'when used'}"
        )


@dataclass(frozen=True, kw_only=True)
class HomeMove:
    """An expert that changes its slot."""

    expert: int
    source: int
    """rank it leaves"""
    source_slot: int
    target: int
    """rank it moves to"""
    target_slot: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HomeSlots:
    """The expert in every home slot."""

    expert_of_slot: NDArray[np.int32]
    """[L, R, H]"""
    cluster: Cluster

    @property
    def placement(self) -> Placement:
        num_layers, num_ranks, num_homes = self.expert_of_slot.shape
        home_LE = np.empty((num_layers, num_ranks * num_homes), np.int32)
        rank = np.repeat(np.arange(num_ranks, dtype=np.int32), num_homes)
        for layer, expert_RH in enumerate(self.expert_of_slot):
            home_LE[layer, expert_RH.ravel()] = rank
        return Placement(home_of_expert=home_LE, cluster=self.cluster)

    @property
    def is_contiguous(self) -> bool:
        """Whether every expert is where the framework puts it."""
        count = self.expert_of_slot[0].size
        return bool((self.expert_of_slot.reshape(-1, count) == np.arange(count)).all())

    def moved_to(self, placement: Placement) -> HomeSlots:
        """The slots after a migration: on each rank, arriving experts take the slots of leaving ones, in order."""
        expert_LRH = self.expert_of_slot.copy()
        moves = Migration(before=self.placement, after=placement).moves()
        for layer, rank in {(layer, rank) for layer, _, _, rank in moves.tolist()}:
            of_layer = moves[moves[:, 0] == layer]
            slots_H = expert_LRH[layer, rank]
            leaving = np.flatnonzero(np.isin(slots_H, of_layer[of_layer[:, 2] == rank, 1]))
            slots_H[leaving] = of_layer[of_layer[:, 3] == rank, 1]
        return HomeSlots(expert_of_slot=expert_LRH, cluster=self.cluster)

    def moves_to(self, other: HomeSlots, layer: int) -> list[HomeMove]:
        """The moves of a layer, ordered by source rank, target rank and expert."""
        before, after = (np.argsort(slots.expert_of_slot[layer].ravel()) for slots in (self, other))
        num_homes = self.expert_of_slot.shape[2]
        moves = [
            HomeMove(
                expert=int(e), source=int(before[e] // num_homes), source_slot=int(before[e] % num_homes),
                target=int(after[e] // num_homes), target_slot=int(after[e] % num_homes),
            )
            for e in np.flatnonzero(before != after)
        ]  # fmt: skip
        return sorted(moves, key=lambda move: (move.source, move.target, move.expert))


def contiguous_slots(cluster: Cluster, *, num_layers: int, num_experts: int) -> HomeSlots:
    """The slots as the framework assigns them: experts in order, equally many per rank."""
    per_rank = cluster.experts_per_rank(num_experts)
    expert_RH = np.arange(num_experts, dtype=np.int32).reshape(cluster.num_ranks, per_rank)
    return HomeSlots(expert_of_slot=np.tile(expert_RH, (num_layers, 1, 1)), cluster=cluster)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotTable:
    """A visit in slots, for one rank: which pairs go to which slot, and which copies are made.

    A slot takes the pairs `first` to `end` - 1 of its expert, counted on this rank in the order of tokens. The slots of
    an expert share all its pairs, even if there are more than planned.
    """

    expert_of_slot: NDArray[np.int64]
    """[P]"""
    first_of_slot: NDArray[np.int64]
    """[P]"""
    end_of_slot: NDArray[np.int64]
    """[P] equal to `first` where a slot is empty"""
    copies: CopyList
    """on all ranks; those held here fill the copy slots in this order"""
    served: list[int]
    """home slot of each copy this rank serves, ordered by holding rank and expert"""

    @property
    def num_copies(self) -> int:
        """Copies on all ranks."""
        return self.copies.num_in_node

    @property
    def num_held(self) -> int:
        """Copies in slots of this rank."""
        return self.copies.held_expert.size


def slot_table(visit: Visit, expert_of_slot: NDArray[np.int32], num_spare: int, rank: int) -> SlotTable:
    """A visit in the slots of a rank. expert_of_slot: [R, H] homes of the layer."""
    num_ranks, num_homes = expert_of_slot.shape
    expert_RS = np.zeros((num_ranks, num_homes + num_spare), np.int64)
    first_RS, end_RS = np.zeros_like(expert_RS), np.zeros_like(expert_RS)
    expert_RS[:, :num_homes] = expert_of_slot
    taken_E = np.zeros(expert_of_slot.size, np.int64)
    used_R = np.full(num_ranks, num_homes)
    for expert, holder, quota in zip(visit.flash_expert, visit.flash_rank, visit.flash_tokens_FR[:, rank], strict=True):
        at = holder, used_R[holder]
        expert_RS[at], first_RS[at], end_RS[at] = expert, taken_E[expert], taken_E[expert] + quota
        taken_E[expert] += quota
        used_R[holder] += 1
    first_RS[:, :num_homes], end_RS[:, :num_homes] = taken_E[expert_of_slot], ALL
    copies = visit.copy_list(rank, range(num_ranks))
    slot_of_expert = np.zeros(expert_of_slot.size, np.int64)
    slot_of_expert[expert_of_slot[rank]] = np.arange(num_homes)
    return SlotTable(
        expert_of_slot=expert_RS.ravel(), first_of_slot=first_RS.ravel(), end_of_slot=end_RS.ravel(), copies=copies,
        served=slot_of_expert[copies.served_expert].tolist(),
    )  # fmt: skip
