"""Settings and slots of integrations that run plans inside another framework. No torch.

Symbols: L layers, R ranks, E experts; of a rank H homes, C slots of standing and S of flash copies; P = R (H + C + S)
slots of all ranks.

Frameworks number experts by their position on a rank. Here slots take that role: rank r has slots r (H + C + S) and
on, homes first, then standing copies, then flash copies. An expert that moves takes the slot of one that leaves, so the
parameters, gradient buckets and optimizer shards of the others do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_choice, check_flag, check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster, Migration, Placement
from equilibra.core.visit import CopyList, Visit, VisitKey
from equilibra.plan.planner import PlannerSetting

RANKS_PER_NODE = 8
MODES = ("replay", "live", "history")
PATHS = ("auto", "collective", "host", "ipc", "both")
ALL = np.int64(2**62)
"""more pairs than a rank can have"""


@dataclass(frozen=True, kw_only=True)
class PlanSetting(PlannerSetting):
    """How steps are planned inside another framework; the same on every rank."""

    standing_slots: int = 0
    """standing copies a node may hold per layer; must be 0 where the framework has none"""
    max_moves_per_layer: int = 0
    """homes that may move per layer and step; must be 0 where the framework cannot move them"""
    ranks_per_node: int | None = None
    """expert-parallel ranks that share fast links; None: 8, or all if there are fewer"""
    timeout_s: float = 300.0
    """seconds until a silent rank counts as lost, in exchanges of counts, hashes and copies"""

    homes_move: ClassVar[bool] = False
    """whether the framework can move homes"""
    copies_stand: ClassVar[bool] = False
    """whether it has standing copies"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, can in (("standing_slots", self.copies_stand), ("max_moves_per_layer", self.homes_move)):
            if getattr(self, name) and not can:
                raise InputError(f"{self.section}{name} must be 0 inside this framework, not {getattr(self, name)}")
        if self.ranks_per_node is not None:
            check_whole(f"{self.section}ranks_per_node", self.ranks_per_node, low=1, high=2**16 - 1)
        check_number(f"{self.section}timeout_s", self.timeout_s, above=0, high=1e6, below=True)

    def description(self, cluster: Cluster) -> str:
        """Settings that must be the same on every rank, as text that ranks compare."""
        return (
            f"{self.chosen_planner.name}, {self.spare_slots} spare and {self.standing_slots} standing slots, "
            f"nodes of {cluster.ranks_per_node}, "
            f"seed {self.seed}, {self.prices_hash()}"
        )


def cluster_of(num_ranks: int, ranks_per_node: int | None) -> Cluster:
    """The cluster of an expert-parallel group. ranks_per_node: None for 8, or all ranks if there are fewer."""
    per_node = min(RANKS_PER_NODE, num_ranks) if ranks_per_node is None else ranks_per_node
    if num_ranks % per_node:
        raise InputError(f"{num_ranks} expert-parallel ranks cannot be nodes of {per_node}: set ranks_per_node")
    return Cluster(num_nodes=num_ranks // per_node, ranks_per_node=per_node)


class SlotCounts(NamedTuple):
    """Slots of a rank for copies."""

    standing: int
    flash: int

    @property
    def num(self) -> int:
        return self.standing + self.flash


@dataclass(frozen=True, kw_only=True)
class MegatronSetting(PlanSetting):
    """How steps are planned inside Megatron-Core; the same on every rank."""

    homes_move: ClassVar[bool] = True
    copies_stand: ClassVar[bool] = True

    standing_slots: int = 2
    """standing copies a node may hold per layer, where expert-parallel ranks are several nodes"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step; -1: as many as pay. None move without an optimizer, or live"""
    mode: str = "replay"
    """replay: steps are planned ahead, from recorded routing. live: every forward of a layer is planned from what its
    router has just chosen, and its flash copies are fetched then; standing copies follow the loads of past steps.
    history: standing copies and homes follow past steps, and nothing is planned per micro-batch. The last two need no
    routing replay"""
    history_steps: int = 4
    """past steps that live and history plan from"""
    prefetch: bool = True
    """fetch copies while the previous layer computes; takes the spare slots twice"""
    path: str = "auto"
    """how flash copies travel inside a node: auto, collective, host, ipc or both, as in our own runtime"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.section}mode", self.mode, MODES)
        check_whole(f"{self.section}history_steps", self.history_steps, low=1, high=1000)
        check_flag(f"{self.section}prefetch", self.prefetch)
        check_choice(f"{self.section}path", self.path, PATHS)

    def slot_counts(self, cluster: Cluster) -> SlotCounts:
        standing = self.standing_slots if cluster.num_nodes > 1 else 0
        return SlotCounts(standing=standing, flash=0 if self.mode == "history" else self.spare_slots)

    def cluster_of(self, num_ranks: int) -> Cluster:
        """The cluster to plan for. With mode history every rank is a node, since standing copies balance nodes."""
        return cluster_of(num_ranks, 1 if self.mode == "history" else self.ranks_per_node)

    def description(self, cluster: Cluster) -> str:
        return (
            f"{super().description(cluster)}, {self.mode}, {self.max_moves_per_layer} moves, "
            f"copies fetched {'ahead' if self.prefetch else 'when used'}, {self.path}"
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
        num_layers, _, num_homes = self.expert_of_slot.shape
        slot_LE = self.expert_of_slot.reshape(num_layers, -1).argsort(axis=1)
        return Placement(home_of_expert=(slot_LE // num_homes).astype(np.int32), cluster=self.cluster)

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

    key: VisitKey
    """micro-batch -1: no plan has it"""
    expert_of_slot: NDArray[np.int64]
    """[P]"""
    first_of_slot: NDArray[np.int64]
    """[P]"""
    end_of_slot: NDArray[np.int64]
    """[P] equal to `first` where a slot is empty"""
    flash: CopyList
    """flash copies of the rank's node; those held here fill their slots in this order"""
    num_standing: int
    """standing copies on all ranks; those held here fill their slots in the order of experts"""
    scale: int = 0
    """0: `first` and `end` are numbers of pairs; else shares of all pairs of the expert on this rank, of `scale`"""


def slot_table(
    visit: Visit, expert_of_slot: NDArray[np.int32], counts: SlotCounts, rank: int, ranks_of_node: range,
    scale: int = 0,
) -> SlotTable:  # fmt: skip
    """A visit in the slots of a rank.

    expert_of_slot: [R, H] homes of the layer. ranks_of_node: those of its node. scale: above 0 where the visit has
    shares of it in place of tokens.
    """
    num_ranks, num_homes = expert_of_slot.shape
    expert_RS = np.zeros((num_ranks, num_homes + counts.num), np.int64)
    first_RS, end_RS = np.zeros_like(expert_RS), np.zeros_like(expert_RS)
    expert_RS[:, :num_homes] = expert_of_slot
    taken_E = np.zeros(expert_of_slot.size, np.int64)
    for begin, experts, holders, tokens in (
        (num_homes, visit.standing_expert, visit.standing_rank, visit.standing_tokens_CR[:, rank]),
        (num_homes + counts.standing, visit.flash_expert, visit.flash_rank, visit.flash_tokens_FR[:, rank]),
    ):
        used_R = np.full(num_ranks, begin)
        for expert, holder, quota in zip(experts, holders, tokens, strict=True):
            at = holder, used_R[holder]
            expert_RS[at], first_RS[at], end_RS[at] = expert, taken_E[expert], taken_E[expert] + quota
            taken_E[expert] += quota
            used_R[holder] += 1
    first_RS[:, :num_homes], end_RS[:, :num_homes] = taken_E[expert_of_slot], scale or ALL
    return SlotTable(
        key=visit.key, expert_of_slot=expert_RS.ravel(), first_of_slot=first_RS.ravel(), end_of_slot=end_RS.ravel(),
        flash=visit.copy_list(rank, ranks_of_node), num_standing=visit.standing_expert.size, scale=scale,
    )  # fmt: skip
