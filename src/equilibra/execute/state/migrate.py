"""Move homes between steps: weights, masters and optimizer moments of the experts whose home changes.

Symbols: H homes on this rank, B bytes of one expert in one tensor, w columns at a time, R ranks, S experts that leave
(as many arrive: every rank has H homes before and after).

An expert is one row of several stacked tensors [H, ...]. A tensor moves as bytes [H, B], a few columns at a time:
leaving rows are packed and exchanged, rows that only change slot wait in staging, then all are written to their new
slots. Tensors keep their storage, so optimizers and views stay valid.

Staging is allocated before anything moves; if any rank cannot, no rank moves. An interrupted move marks the runtime
broken, so nothing computes with or saves a mixed state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equilibra.core.errors import BrokenStateError, BudgetError, EquilibraError, InputError
from equilibra.core.placement import Migration
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.runtime import Runtime

ALIGNMENT = 16
"""bytes; columns start at multiples of it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMove:
    """The moves of one layer as one rank sees them. Slots are in the order of expert numbers, before and after."""

    layer: int
    leaving_slots: list[int]
    """[S] by target rank and expert"""
    sent_sizes: list[int]
    """[R] experts to each rank"""
    arriving_experts: list[int]
    """[S] by the rank they come from and their number"""
    arriving_from: list[int]
    """[S]"""
    arriving_slots: list[int]
    """[S]"""
    received_sizes: list[int]
    """[R] experts from each rank"""
    shifted: list[tuple[int, int]]
    """old and new slot of experts that stay on this rank but change slot"""
    staging_rows: int
    """rows that staging must hold on the rank that needs most; equal on all ranks"""


def layer_move(migration: Migration, layer: int, rank: int) -> LayerMove:
    """The moves of a layer as a rank sees them."""
    before, after = migration.before.home_of_expert[layer], migration.after.home_of_expert[layer]
    num_ranks = migration.before.cluster.num_ranks
    old, new = np.flatnonzero(before == rank), np.flatnonzero(after == rank)
    leaving, arriving = old[after[old] != rank], new[before[new] != rank]
    leaving = leaving[np.argsort(after[leaving], kind="stable")]
    arriving = arriving[np.argsort(before[arriving], kind="stable")]
    stay = old[after[old] == rank]
    shifted = np.stack([np.searchsorted(old, stay), np.searchsorted(new, stay)], axis=1)
    most_leaving = int(np.bincount(before[before != after], minlength=num_ranks).max())
    return LayerMove(
        layer=layer,
        leaving_slots=np.searchsorted(old, leaving).tolist(),
        sent_sizes=np.bincount(after[leaving], minlength=num_ranks).tolist(),
        arriving_experts=arriving.tolist(),
        arriving_from=before[arriving].tolist(),
        arriving_slots=np.searchsorted(new, arriving).tolist(),
        received_sizes=np.bincount(before[arriving], minlength=num_ranks).tolist(),
        shifted=[(int(a), int(b)) for a, b in shifted if a != b],
        staging_rows=len(old) + most_leaving,  # S packed, S received, at most H - S aside
    )


def width_of(move: LayerMove, num_columns: int, max_bytes: int) -> int:
    """Columns that fit into staging at once."""
    width = max_bytes // move.staging_rows // ALIGNMENT * ALIGNMENT
    if width < ALIGNMENT:
        raise BudgetError(
            f"cannot move homes of MoE layer {move.layer} with {max_bytes} bytes of staging: {move.staging_rows} rows "
            f"need at least {move.staging_rows * ALIGNMENT} bytes; raise max_bytes"
        )
    return min(width, -(-num_columns // ALIGNMENT) * ALIGNMENT)


@torch.no_grad()
def move_columns(group: ExpertGroup, move: LayerMove, columns_Hw: Tensor, staging: Tensor) -> None:
    """Move the rows of a few columns to their new ranks and slots."""
    width, num_leaving, num_shifted = columns_Hw.shape[1], len(move.leaving_slots), len(move.shifted)
    used = staging[: (2 * num_leaving + num_shifted) * width].view(-1, width)
    sent, received, aside = torch.split(used, [num_leaving, num_leaving, num_shifted])
    for row, slot in enumerate(move.leaving_slots):
        sent[row].copy_(columns_Hw[slot])
    moving = group.all_to_all(
        Channel.STANDING, sent.reshape(-1), [n * width for n in move.sent_sizes], received.view(-1),
        [n * width for n in move.received_sizes], what=f"moving homes of MoE layer {move.layer}",
    )  # fmt: skip
    for row, (slot, _) in enumerate(move.shifted):
        aside[row].copy_(columns_Hw[slot])
    moving.wait()
    for row, (_, slot) in enumerate(move.shifted):
        columns_Hw[slot].copy_(aside[row])
    for row, slot in enumerate(move.arriving_slots):
        columns_Hw[slot].copy_(received[row])


Carried = Callable[[nn.Parameter], Mapping[str, Tensor]]
"""for a stacked parameter [H, ...], the tensors [H, ...] that move with it, by name; equal on all ranks"""

DEFAULT_STAGING_BYTES = 256 << 20


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor] | None = None
) -> Carried:
    """Carry all tensors `optimizer` keeps of a parameter except scalars, and the parameter's master if it has one."""
    copies = masters or {}

    def tensors(parameter: nn.Parameter) -> dict[str, Tensor]:
        master = copies.get(parameter, parameter)
        state = optimizer.state.get(master, {}).items()
        kept = {name: value for name, value in state if isinstance(value, Tensor) and value.ndim}
        return kept if master is parameter else {"master": master, **kept}

    return tensors


def migrate(
    runtime: Runtime, migration: Migration, carried: Carried | None = None, *, max_bytes: int = DEFAULT_STAGING_BYTES
) -> None:
    """Collective, between optimizer steps: move experts to their homes in `migration.after`; max_bytes: of staging."""
    runtime.check_whole()
    group = runtime.group
    checked = group.all_succeed(
        lambda: _checked(runtime, migration, carried, max_bytes), what="checking which homes move"
    )
    group.agree(checked.description, what="what moves with an expert")
    runtime.disarm()  # its standing copies are of the old homes, and their memory is free now
    staging = group.all_succeed(
        lambda: _staging(checked.staging_bytes, runtime.weights[0].device),
        what=f"taking {checked.staging_bytes} bytes of memory to move homes",
    )
    moved: list[LayerMove] = []
    with _broken_if_cut_off(runtime, moved, len(checked.moves)):
        for move in checked.moves:
            begin, tensors = perf_counter(), checked.tensors[move.layer]
            for rows_HB in tensors:
                width = width_of(move, rows_HB.shape[1], staging.numel())
                for first in range(0, rows_HB.shape[1], width):
                    move_columns(group, move, rows_HB[:, first : first + width], staging)
            _record(runtime, move, sum(rows_HB.shape[1] for rows_HB in tensors), begin)
            moved.append(move)
        group.all_succeed(lambda: None, what="hearing from all ranks that their homes have moved")
        for layer, weights in enumerate(runtime.weights):
            weights.experts = np.flatnonzero(migration.after.home_of_expert[layer] == group.rank).astype(np.int32)
        runtime.placement = migration.after
    runtime.weights_changed()


class _Checked(NamedTuple):
    """What a migration will do, once it is known that it can."""

    moves: list[LayerMove]
    tensors: dict[int, list[Tensor]]
    """by layer, as bytes [H, B]"""
    staging_bytes: int
    description: str


def _checked(runtime: Runtime, migration: Migration, carried: Carried | None, max_bytes: int) -> _Checked:
    """Raise InputError or BudgetError if homes cannot move; changes nothing."""
    _check_moment(runtime, migration)
    hashed = hashlib.sha256(f"{max_bytes}".encode())
    for placement in (migration.before, migration.after):
        hashed.update(placement.home_of_expert.tobytes())
    layers = np.unique(migration.moves()[:, 0]).tolist()
    moves, tensors, staging_bytes = [layer_move(migration, layer, runtime.group.rank) for layer in layers], {}, 0
    for move in moves:
        names, tensors[move.layer] = _tensors_of(runtime, move.layer, carried)
        hashed.update("\n".join(names).encode())
        width = width_of(move, max(tensor.shape[1] for tensor in tensors[move.layer]), max_bytes)
        staging_bytes = max(staging_bytes, move.staging_rows * width)
    num_tensors = sum(map(len, tensors.values()))
    description = f"{migration.num_moves} moves, {num_tensors} tensors, {hashed.hexdigest()[:16]}"
    return _Checked(moves, tensors, staging_bytes, description)


def _check_moment(runtime: Runtime, migration: Migration) -> None:
    """Raise InputError if homes cannot move now, or not from where they are."""
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
    """The only memory that a migration allocates."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _broken_if_cut_off(runtime: Runtime, moved: list[LayerMove], num_layers: int) -> Iterator[None]:
    """Mark the runtime broken if the block ends early, because experts are then in two places or none."""
    try:
        yield
    except BaseException as error:
        runtime.broken = (
            f"a migration was cut off after {len(moved)} of {num_layers} layers ({type(error).__name__}): experts, "
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
