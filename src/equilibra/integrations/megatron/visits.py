"""What a balanced layer adds to Megatron's: pairs go to slots, and copies run beside the experts.

Symbols: T tokens, E experts, P slots of all ranks, R rows that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.events.schema import Direction
from equilibra.execute.group import ExpertGroup
from equilibra.execute.micro_batch import to_device
from equilibra.execute.record import direction_now
from equilibra.integrations.executor.visits import LayerVisits
from equilibra.integrations.megatron.copies import Fetched, Packing, carry, fetch, parts_of, run_copies
from equilibra.integrations.planned import SlotTable

__all__ = ["MOST_LAYERS", "Ahead", "MegatronVisits", "to_slots"]


class MegatronVisits(LayerVisits):
    """The armed visits of one layer and their copies. Any number of micro-batches may be in flight."""

    def __init__(
        self, layer: int, group: ExpertGroup, experts: nn.Module, template: nn.Module | None, *, fused: bool
    ) -> None:
        self.parts = parts_of(experts)
        super().__init__(layer, group, num_homes=len(self.parts), in_flight=True)
        self.template = template
        """experts of the copy slots, without weights; None if there are no copy slots"""
        dtypes = {part.dtype for one in self.parts for part in one.values()}
        if len(dtypes) != 1:
            raise InputError(f"expert weights of MoE layer {layer} must have one dtype, not {dtypes}")
        (self.dtype,) = dtypes
        self._fused = fused
        self.ahead: Ahead | None = None
        """predicts the next layer; None: copies are fetched when used"""
        self.num_ahead, self.num_late = 0, 0
        """visits whose copies were requested before their layer began, and visits whose were not"""
        self.expert_of_home: list[int] = []
        """[H] logical numbers"""
        self.moved = False
        """whether any expert of any layer is not where plain Megatron puts it"""
        self.gathers: Sequence[Callable[[], None]] = ()
        """each waits for the optimizer's shards of some weights, where DDP gathers them during the forward"""
        self.live: Callable[[int, Tensor], SlotTable] | None = None
        """plans a forward from this rank's counts [E]; None: forwards are planned ahead"""
        self.without_plan: SlotTable | None = None
        """homes only, used while no step is armed"""
        self._arriving: dict[tuple[Direction, int], Fetched] = {}
        """copies of later visits"""
        self._arrived: Fetched | None = None
        """copies of the running forward"""

    def left_over(self) -> list[Fetched]:
        """Copies in transit that will not be used; the caller waits for them."""
        left = [*self._arriving.values(), *([self._arrived] if self._arrived else [])]
        self._arriving, self._arrived = {}, None
        return left

    # --- copies ahead ---

    @property
    def num_arriving(self) -> int:
        """Later visits whose copies were requested."""
        return len(self._arriving)

    def fetch_next(self, direction: Direction) -> None:
        """Collective: start to fetch the copies of the next visit, unless they were requested already."""
        number = self._begun[direction]
        slots = None if (direction, number) in self._arriving else self._visit(number)
        if slots is not None and slots.num_copies:
            self._arriving[direction, number] = self._fetch(slots)

    def _begin_copies(self, slots: SlotTable, direction: Direction) -> None:
        """Request the copies of this visit, if that is still to do, and those of the next layer."""
        if self.ahead is None or self._visits is None:
            return
        self._arrived = self._arriving.pop((direction, self.number), None)
        if self._arrived is not None:
            self.num_ahead += 1
        elif slots.num_copies:
            self.num_late += 1
            self._arrived = self._fetch(slots)
        self.ahead.began(self.layer, direction)

    def wait_for_weights(self) -> None:
        """Collective over replicas: return when the weights are those of the last optimizer step."""
        for gather in self.gathers:
            gather()

    def _fetch(self, slots: SlotTable) -> Fetched:
        self.wait_for_weights()
        parts = list(self.parts[0].values())
        packing = Packing(
            group=self.group, part_shapes=[part.shape for part in parts], like=parts[0].detach(), fused=self._fused
        )
        return fetch(packing, slots, self.parts)

    # --- a forward ---

    def to_slots(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a forward: the router's probabilities and map, over slots instead of experts."""
        if self.live is not None:
            slots: SlotTable | None = self.live(self.layer, map_TE.sum(dim=0))
        else:
            slots = self.take() or self.without_plan
        assert slots is not None
        self.current = slots
        self._begin_copies(slots, direction_now())
        return to_slots(probs_TE, map_TE, slots)

    def run(self, homes: Callable[..., Any], rows_RD: Tensor, count_of_slot: Tensor, probs_R: Tensor) -> Any:  # noqa: ANN401
        """Run homes and copies on rows ordered by slot. homes: the experts' own forward."""
        slots, at = self.current, self.num_homes
        assert slots is not None
        copies: list[list[Tensor]] = []
        if slots.num_copies:
            fetched, self._arrived = self._arrived or self._fetch(slots), None
            rows_RD, probs_R, copies = carry(fetched, rows_RD, probs_R, self.parts)
            del fetched  # frees its buffers
        if not copies:
            return homes(rows_RD, count_of_slot[:at], probs_R)
        num = int(count_of_slot[:at].sum())
        out, bias = homes(rows_RD[:num], count_of_slot[:at], probs_R[:num])
        more = run_copies(self.template, copies, rows_RD[num:], count_of_slot[at:], probs_R[num:])
        return torch.cat([out, more]), bias


def to_slots(probs_TE: Tensor, map_TE: Tensor, slots: SlotTable) -> tuple[Tensor, Tensor]:
    """[T, P] probabilities and map: each pair in exactly one slot of its expert. Reads nothing from the device."""
    expert, first, end = (
        to_device(values, map_TE.device) for values in (slots.expert_of_slot, slots.first_of_slot, slots.end_of_slot)
    )
    number_TE = map_TE.cumsum(dim=0) - 1
    number_TP = number_TE.index_select(1, expert)
    map_TP = map_TE.index_select(1, expert) & (number_TP >= first) & (number_TP < end)
    return probs_TE.index_select(1, expert) * map_TP, map_TP


MOST_LAYERS = 2
"""layers whose copies may wait at a time: the next one's, and those of an earlier prediction"""


class Ahead:
    """Predicts the next layer of a pipeline stage, separately for each stage of the step, to prefetch its copies.

    The order depends on Megatron's schedule (1F1B, interleaved) and on activation recompute, so it is learned: the
    layer that came next last time is expected again. Ranks of an expert-parallel group run layers in the same order, so
    they fetch the same copies in the same order. A wrong prediction costs time only: copies wait for their layer,
    direction and micro-batch, and a layer without prefetched copies fetches its own.
    """

    def __init__(self, layers: Sequence[MegatronVisits]) -> None:
        self._layers = layers
        self._after_of_stage: dict[Stage, dict[tuple[Direction, int], tuple[Direction, int]]] = {}
        self.arm(Stage.UPDATE)

    def arm(self, stage: Stage) -> None:
        """Begin a pass. Nothing is fetched for its first layer: weights may still be loaded before it runs."""
        self._after = self._after_of_stage.setdefault(stage, {})
        self._last: tuple[Direction, int] | None = None

    def began(self, layer: int, direction: Direction) -> None:
        """Note that a layer began, and start to fetch the copies of the layer expected next."""
        now = direction, layer
        if self._last is not None:
            self._after[self._last] = now
        self._last = now
        following = self._after.get(now)
        if following is not None and sum(one.num_arriving for one in self._layers) < MOST_LAYERS:
            self._layers[following[1]].fetch_next(following[0])
