"""Move homes between steps: weights, masters and optimizer moments of the experts whose home changes.

Symbols: H homes on this rank, B bytes of one expert in one tensor, R ranks, S experts that leave (and arrive).

Everything of an expert is rows of stacked tensors [H, ...]: the layer's parameters, and what is carried with them
(masters, moments). A tensor is moved as bytes [H, B], a few columns at a time: rows that leave are packed and
exchanged, rows that stay but change their slot wait aside, then all are written where the new placement has them.
Tensors keep their storage, so optimizers and views of them stay good.

Promises. The staging memory is bounded and taken once, before anything moves; if any rank cannot take it, no rank moves
anything. There and back is the identity to the bit. Where a move is cut off (a rank is lost), the runtime is marked
broken: nothing computes with, or saves, a mixed state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equilibra.core.errors import BrokenStateError, EquilibraError, InputError
from equilibra.core.placement import Migration
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.group import ExpertGroup
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.migrate_layer import LayerMove, layer_move, move_columns, width_of

__all__ = ["Carried", "Migrated", "migrate", "optimizer_tensors"]

Carried = Callable[[nn.Parameter], Mapping[str, Tensor]]
"""for a stacked parameter [H, ...]: the tensors [H, ...] that travel with it, by name; the same on all ranks"""

DEFAULT_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """What moved."""

    num_moves: int
    """experts that changed their home, over all ranks of the group"""
    num_bytes: int
    """sent by this rank"""
    num_exchanges: int
    """all-to-alls it took"""
    staging_bytes: int
    """memory it took on this rank for the time of the move"""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor] | None = None
) -> Carried:
    """Everything `optimizer` keeps of a parameter but single numbers.

    masters: where the optimizer works on copies of the parameters in more digits, the copy of each parameter. It
    travels too, and state is looked up under it.
    """
    copies = masters or {}

    def tensors(parameter: nn.Parameter) -> dict[str, Tensor]:
        master = copies.get(parameter, parameter)
        state = optimizer.state.get(master, {}).items()
        kept = {name: value for name, value in state if isinstance(value, Tensor) and value.ndim}
        return kept if master is parameter else {"master": master, **kept}

    return tensors


def migrate(
    runtime: Runtime, migration: Migration, carried: Carried | None = None, *, max_bytes: int = DEFAULT_STAGING_BYTES
) -> Migrated:
    """Bring every expert to its home of `migration.after`. All ranks of all groups call it, between optimizer steps.

    max_bytes: memory for staging on each rank.
    """
    if runtime.broken is not None:
        raise BrokenStateError(runtime.broken)
    group, checked = runtime.group, _Checked()
    group.all_succeed(lambda: checked.fill(runtime, migration, carried, max_bytes), what="checking which homes move")
    group.agree(checked.description, what="what moves with an expert")
    runtime.disarm()  # its standing copies are of the old homes, and their memory is free now

    staging: list[Tensor] = []

    def allocate() -> None:
        staging.append(_staging(checked.staging_bytes, runtime.weights[0].device))

    group.all_succeed(allocate, what=f"taking {checked.staging_bytes} bytes of memory to move homes")
    done = _Counter()
    with _broken_if_cut_off(runtime, done, len(checked.moves)):
        for move in checked.moves:
            begin = perf_counter()
            num_bytes = _move_layer(group, move, checked.tensors[move.layer], staging[0], done)
            _record(runtime, move, num_bytes, begin)
            done.layers += 1
        group.all_succeed(lambda: None, what="hearing from all ranks that their homes have moved")
        for layer, weights in enumerate(runtime.weights):
            weights.experts = np.flatnonzero(migration.after.home_of_expert[layer] == group.rank).astype(np.int32)
        runtime.placement = migration.after
    runtime.weights_changed()
    return Migrated(
        num_moves=migration.num_moves, num_bytes=done.num_bytes, num_exchanges=done.exchanges,
        staging_bytes=checked.staging_bytes,
    )  # fmt: skip


@dataclass(kw_only=True)
class _Counter:
    layers: int = 0
    exchanges: int = 0
    num_bytes: int = 0


class _Checked:
    """What is to be done, once it is known that it can be."""

    def __init__(self) -> None:
        self.moves: list[LayerMove] = []
        self.tensors: dict[int, list[Tensor]] = {}
        """by layer, as bytes [H, B]"""
        self.staging_bytes = 0
        self.description = ""

    def fill(self, runtime: Runtime, migration: Migration, carried: Carried | None, max_bytes: int) -> None:
        """Look at everything and change nothing."""
        _check_moment(runtime, migration)
        hashed = hashlib.sha256(f"{max_bytes}".encode())
        for placement in (migration.before, migration.after):
            hashed.update(placement.home_of_expert.tobytes())
        num_tensors = 0
        for layer in np.unique(migration.moves()[:, 0]).tolist():
            move = layer_move(migration, layer, runtime.group.rank)
            names, tensors = _tensors_of(runtime, layer, carried)
            hashed.update("\n".join(names).encode())
            self.moves.append(move)
            self.tensors[layer] = tensors
            widest = max(tensor.shape[1] for tensor in tensors)
            width = width_of(move, widest, max_bytes)
            self.staging_bytes = max(self.staging_bytes, move.staging_rows * width)
            num_tensors += len(tensors)
        self.description = f"{migration.num_moves} moves, {num_tensors} tensors, {hashed.hexdigest()[:16]}"


def _check_moment(runtime: Runtime, migration: Migration) -> None:
    """Whether homes can move now, from where they are."""
    if migration.before != runtime.placement:
        raise InputError(
            "cannot move homes: the migration starts from another placement than the one the experts are at; plan it "
            "from runtime.placement"
        )
    if not (migration.before.is_even() and migration.after.is_even()):
        raise InputError(
            "cannot move homes: every rank must be home of equally many experts of every layer, before and after, not "
            f"of {np.unique([migration.before.num_homes(), migration.after.num_homes()]).tolist()}"
        )
    if runtime.current is not None:
        raise InputError("cannot move homes inside `with micro_batch:`; move them between steps")
    if runtime.gradients_under_way:
        raise InputError(
            "cannot move homes while copies hold gradients: finish_gradients() and the optimizer come first"
        )


def _tensors_of(runtime: Runtime, layer: int, carried: Carried | None) -> tuple[list[str], list[Tensor]]:
    """Names with types and shapes, and bytes [H, B], of everything that moves with the experts of a layer."""
    weights = runtime.weights[layer]
    names, tensors, seen = [], [], set[int]()
    for part in weights.names:
        parameter = weights.get_parameter(part)
        named: dict[str, Tensor] = {"": parameter, **(dict(sorted(carried(parameter).items())) if carried else {})}
        for name, tensor in named.items():
            what = f"{part}{'.' if name else ''}{name} of MoE layer {layer}"
            if tensor.ndim < 1 or tensor.shape[0] != weights.experts.size or not tensor.is_contiguous():
                raise InputError(
                    f"cannot move {what}: it must be contiguous with a row for each of {weights.experts.size} homes; "
                    f"it has shape {list(tensor.shape)} and strides {tensor.stride()}"
                )
            if tensor.is_leaf and tensor.grad is not None and bool(tensor.grad.any()):
                raise InputError(
                    f"cannot move {what}: its gradient would stay behind; call optimizer.zero_grad() before"
                )
            if tensor.numel() == 0 or tensor.data_ptr() in seen:
                continue  # a master that is the parameter itself must not move twice
            seen.add(tensor.data_ptr())
            names.append(f"{what} {tensor.dtype} {list(tensor.shape[1:])}")
            tensors.append(tensor.detach().view(tensor.shape[0], -1).view(torch.uint8))
    return names, tensors


def _staging(num_bytes: int, device: torch.device) -> Tensor:
    """The only memory that a migration takes."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _move_layer(
    group: ExpertGroup, move: LayerMove, tensors: list[Tensor], staging: Tensor, counter: _Counter
) -> int:  # fmt: skip
    """Move everything of one layer; returns the bytes of one expert."""
    expert_bytes = 0
    for rows_HB in tensors:
        num_columns = rows_HB.shape[1]
        expert_bytes += num_columns
        width = width_of(move, num_columns, staging.numel())
        for first in range(0, num_columns, width):
            move_columns(group, move, rows_HB[:, first : first + width], staging)
            counter.exchanges += 1
    counter.num_bytes += expert_bytes * len(move.leaving_slots)
    return expert_bytes


@contextmanager
def _broken_if_cut_off(runtime: Runtime, done: _Counter, num_layers: int) -> Iterator[None]:
    """Whatever ends the block early leaves experts in two places or none: mark it, and say so."""
    try:
        yield
    except BaseException as error:
        runtime.broken = (
            f"a migration was cut off after {done.layers} of {num_layers} layers ({type(error).__name__}): experts, "
            "their masters and moments are mixed and must not be used or saved; load the last checkpoint"
        )
        if isinstance(error, Exception) and not isinstance(error, EquilibraError):
            raise BrokenStateError(f"{runtime.broken} ({error})") from error
        raise


def _record(runtime: Runtime, move: LayerMove, expert_bytes: int, begin: float) -> None:
    """One event per expert that arrived here; they share the time of the layer."""
    per_node, rank, count = runtime.group.cluster.ranks_per_node, runtime.group.rank, len(move.arriving_experts)
    times: NDArray[np.float64] = np.linspace(begin, perf_counter(), count + 1)
    for i, (expert, peer) in enumerate(zip(move.arriving_experts, move.arriving_from, strict=True)):
        link = Resource.NVLINK if peer // per_node == rank // per_node else Resource.NIC
        runtime.recorder.add(
            Kind.MIGRATION, link, VisitKey.once(move.layer), Direction.FORWARD, float(times[i]), float(times[i + 1]),
            num_bytes=expert_bytes, peer=peer, expert=expert,
        )  # fmt: skip
