"""Megatron's experts as the home experts that copies are made of, and copies inside autograd.

Copies are those of our own runtime (`execute/copies`): spare slots that all layers and micro-batches share, standing
copies, and engines that move them. What differs here is that Megatron's experts compute, under autograd:

    carry           rows pass through it. Its forward hands out the weights of copies; its backward takes their
                    gradients, so every rank joins the exchange even with no copy of its own, and before it sends
                    gradients of tokens. All home parameters pass too, so DDP's hooks see no parameter as finished
                    before the layer's copies are
    opened          results pass through it. Its backward comes first and fetches the flash copies again
    saved tensors   autograd keeps the place of a flash copy, not its weights

Gradients of copies are summed in float32 and added to `main_grad`, where DDP reduces from, or to `grad`. They travel
while backward goes on. Buckets of a model in DDP wait for them (`SharedCopies.bring_home`); otherwise the layer does.
Experts are Megatron's `SequentialMLP` or Transformer Engine's grouped ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.plan import GroupPlan
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction
from equilibra.execute.copies.copies import Copies, CopySetting
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.group import ExpertGroup
from equilibra.execute.kernels import add_in_order
from equilibra.execute.record import Recorder
from equilibra.integrations.planned import SlotTable

NAMES = (re.compile(r"^local_experts\.(\d+)\.(.+)$"), re.compile(r"^(.+\.(?:weight|bias))(\d+)$"))
Parts = dict[str, Tensor]
"""an expert's weights, or their gradients, by name"""


def slot_and_part(name: str) -> tuple[int, str]:
    """Slot and part in a parameter's name, such as `local_experts.3.linear_fc1.weight` or `linear_fc1.weight3`."""
    if found := NAMES[0].match(name):
        return int(found[1]), found[2]
    if found := NAMES[1].match(name):
        return int(found[2]), found[1]
    raise InputError(
        f"cannot tell which expert parameter {name} belongs to: experts must be SequentialMLP or TEGroupedMLP, with "
        "separate parameters per expert; switch moe_use_legacy_grouped_gemm off"
    )


def parts_of(experts: nn.Module) -> list[dict[str, nn.Parameter]]:
    """The parameters of each slot by part, in one order for all slots."""
    slots: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in experts.named_parameters():
        slot, part = slot_and_part(name)
        slots.setdefault(slot, {})[part] = parameter
    found = [dict(sorted(slots[slot].items())) for slot in sorted(slots)]
    if not found or any(
        {part: p.shape for part, p in one.items()} != {part: p.shape for part, p in found[0].items()} for one in found
    ):
        shapes = [{part: list(p.shape) for part, p in one.items()} for one in found]
        raise InputError(f"experts of a layer must have parameters of the same names and shapes, not {shapes}")
    return found


class MegatronExperts:
    """The `HomeExperts` of one of Megatron's layers: a parameter for each part of each expert."""

    def __init__(self, experts: nn.Module, layer: int) -> None:
        self.parts = parts_of(experts)
        """by home slot"""
        self.layout = FlatLayout({name: tuple(part.shape) for name, part in self.parts[0].items()}, dict)
        self.expert_of_home: list[int] = []
        """[H] logical numbers"""
        self.gathers: Sequence[Callable[[], None]] = ()
        """each waits for the optimizer's shards of some weights, where DDP gathers them during the forward"""
        dtypes = {part.dtype for part in self.parameters()}
        if len(dtypes) != 1:
            raise InputError(f"expert weights of MoE layer {layer} must have one dtype, not {dtypes}")

    def parameters(self) -> list[nn.Parameter]:
        return [part for of_slot in self.parts for part in of_slot.values()]

    @property
    def _like(self) -> nn.Parameter:
        return next(iter(self.parts[0].values()))

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def learns(self) -> bool:
        return any(part.requires_grad for part in self.parameters())

    def memory(self) -> list[Tensor]:
        return [part.detach()[None] for part in self.parameters()]

    def place(self, slot: int, part: int) -> tuple[int, int]:
        return slot * len(self.layout.shapes) + part, 0

    def slot_of(self, expert: int) -> int:
        return self.expert_of_home.index(expert)

    def check_version(self, layer: int) -> None:  # noqa: ARG002
        """Collective over replicas: return when the weights are those of the last optimizer step."""
        for gather in self.gathers:
            gather()

    @torch.no_grad()
    def write_flat(self, expert: int, row_P: Tensor) -> None:
        for name, part in self.parts[self.slot_of(expert)].items():
            self.layout.part(name, row_P[None])[0].copy_(part)

    @torch.no_grad()
    def add_gradient(self, expert: int, *rows_P: Tensor) -> None:
        for name, part in self.parts[self.slot_of(expert)].items():
            if part.requires_grad:
                add_in_order(_gradient_of(part), [self.layout.part(name, row[None])[0] for row in rows_P])


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """What DDP reduces, or else `grad`, made where missing."""
    found: Tensor | None = getattr(parameter, "main_grad", None)
    if found is not None:
        return found
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class SharedCopies:
    """The copies of all layers of a pipeline stage: when weights are offered, and when gradients must be home."""

    def __init__(
        self, group: ExpertGroup, homes: Sequence[MegatronExperts], setting: CopySetting, recorder: Recorder,
        order: Callable[[VisitKey, Direction], Iterable[VisitKey]],
    ) -> None:  # fmt: skip
        self._make = partial(Copies, group, homes, setting, recorder, order)
        self.found: Copies | None = None
        """made when first needed, since weights may be elsewhere before"""
        self._plan: GroupPlan | None = None
        self._offered = False
        self._version = 0
        self.owing: set[int] = set()
        """layers whose standing copies have gradients that have not returned"""

    def arm(self, plan: GroupPlan | None) -> None:
        """Collective: what follows is of this plan, and of the weights as they are when its first layer begins."""
        self.end()
        self._plan = plan

    def offered(self) -> Copies:
        """Collective: the copies of the armed plan, made of current weights."""
        if self._offered and self.found is not None:
            return self.found
        if self.found is not None and not self.found.fits():
            self.found.close()
            self.found = None
        if self.found is None:
            self.found = self._make()
        self.found.arm(self._plan)
        self._version += 1
        self.found.offer(self._version)
        self._offered = True
        return self.found

    def bring_home(self, layers: Iterable[int]) -> None:
        """Collective: return when the homes of these layers have all gradients of their copies so far."""
        if self.found is not None:
            self.found.finish_returns()
            if now := sorted(self.owing.intersection(layers)):
                self.found.return_standing(now)
                self.owing.difference_update(now)

    def end(self) -> None:
        """Collective, before weights may change: bring all gradients home, and drop copies."""
        if self.found is not None and self._offered:
            self.bring_home(self.owing.copy())
            self.found.forget()
            self.found.finish_reads()
        self._offered = False


class _Place(NamedTuple):
    """A part of a flash copy, as autograd keeps it."""

    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]


class CopiesOfVisit:
    """The copies of one forward of a layer on this rank, until its backward has used them."""

    def __init__(self, shared: SharedCopies, slots: SlotTable, homes: MegatronExperts, *, deferred: bool) -> None:
        """deferred: whether others bring the layer's gradients home before they are reduced."""
        self.shared, self.slots, self.homes, self.deferred = shared, slots, homes, deferred
        self.copies = shared.offered()
        self._rows_nP: Tensor | None = None

    @property
    def any_in_reach(self) -> bool:
        """Whether any rank that exchanges copies with this one has one."""
        return bool(self.slots.flash.num_in_node or self.slots.num_standing)

    def take(self, direction: Direction) -> None:
        self._rows_nP = self.copies.take_rows(self.slots.key, direction)

    @property
    def standing(self) -> list[Parts]:
        return self.copies.standing.parts(self.slots.key.layer)[0]

    @property
    def flash(self) -> list[Parts]:
        assert self._rows_nP is not None
        return self.homes.layout.experts(self._rows_nP)

    @torch.no_grad()
    def give_back(self, gradients: Sequence[Parts]) -> None:
        """Accumulate gradients of standing copies, and start returning those of flash copies."""
        key, copies = self.slots.key, self.copies
        standing = copies.standing.parts(key.layer)[1]
        for total, parts in zip(standing, gradients[: len(standing)], strict=True):
            for name, part in parts.items():
                total[name].add_(part)
        for into, parts in zip(copies.flash_gradients(key), gradients[len(standing) :], strict=True):
            for name, part in parts.items():
                into[name].copy_(part)
        copies.send_gradients(key)
        if self.slots.num_standing:
            self.shared.owing.add(key.layer)
        if not self.deferred:
            self.shared.bring_home([key.layer])
        self._rows_nP = None

    # --- what autograd keeps ---

    def run(self, template: Any, weights_of_slot: Sequence[Parts | None], *arguments: Any) -> Tensor:  # noqa: ANN401
        """Run the template's experts with the weights of copies; empty slots get no rows."""
        standin = next(one for one in weights_of_slot if one is not None)
        weights = {}
        for name, _ in template.named_parameters():
            slot, part = slot_and_part(name)
            given = weights_of_slot[slot]
            weights[name] = standin[part].detach() if given is None else given[part]
        with saved_tensors_hooks(self._pack, self._unpack):
            out, _ = torch.func.functional_call(template, weights, arguments)
        return out  # type: ignore[no-any-return]

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        rows_nP = self._rows_nP
        if rows_nP is None or tensor.untyped_storage().data_ptr() != rows_nP.untyped_storage().data_ptr():
            return tensor
        return _Place(tensor.storage_offset() - rows_nP.storage_offset(), tensor.size(), tensor.stride())

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self._rows_nP is not None
        return self._rows_nP.as_strided(packed.size, packed.stride, self._rows_nP.storage_offset() + packed.offset)


def carry(visit: CopiesOfVisit, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, list[Parts], list[Parts]]:
    """Rows and probabilities unchanged, and the standing and flash copies of this rank in the order of slots."""
    if torch.is_grad_enabled() and not (rows.requires_grad or probs.requires_grad):
        raise ExecuteError(
            f"gradients of copies of MoE layer {visit.slots.key.layer} would be lost on ranks that hold none: neither "
            "its input nor its router requires a gradient; train one of them, or set spare_slots=0 and standing_slots=0"
        )
    rows, probs, *flat = _Carry.apply(visit, rows, probs, *visit.homes.parameters())  # type: ignore[no-untyped-call]
    held, num_standing = _by_expert(visit, flat), len(visit.standing)
    return rows, probs, held[:num_standing], held[num_standing:]


def opened(visit: CopiesOfVisit, results: Tensor, began: Callable[[], None]) -> Tensor:
    """Results unchanged; backward starts here. began: called then."""
    out: Tensor = _Opened.apply(visit, began, results)  # type: ignore[no-untyped-call]
    return out


def _by_expert(visit: CopiesOfVisit, flat: Sequence[Tensor]) -> list[Parts]:
    names = list(visit.homes.layout.shapes)
    return [
        dict(zip(names, flat[at : at + len(names)], strict=True)) for at in range(0, len(flat), len(names))
    ]  # fmt: skip


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: CopiesOfVisit, rows: Tensor, probs: Tensor, *_homes: nn.Parameter) -> Any:  # noqa: ANN401
        ctx.visit = visit
        held = [part for one in (*visit.standing, *visit.flash) for part in one.values()]
        if not visit.homes.learns:
            ctx.mark_non_differentiable(*held)
        return rows.view_as(rows), probs.view_as(probs), *held

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        visit: CopiesOfVisit = ctx.visit
        if visit.homes.learns:
            visit.give_back(_by_expert(visit, grads))
        return None, grad_rows, grad_probs, *(None for _ in visit.homes.parameters())


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visit: CopiesOfVisit, began: Callable[[], None], results: Tensor) -> Tensor:  # noqa: ANN401
        ctx.visit, ctx.began = visit, began
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401
        visit: CopiesOfVisit = ctx.visit
        visit.copies.settle(visit.slots.key.layer)
        ctx.began()
        visit.take(Direction.BACKWARD)
        return None, None, *gradients
