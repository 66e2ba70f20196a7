"""The expert layer on a GPU: `expert_math`'s forward and backward pass as grouped products.

Symbols: N rows, D width, F inner width, I instances.

Everything the kernels need to know is made on the host, where sizes are known, and goes to the device in one pinned
copy: nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.execute.kernels import has_triton, multiprocessors
from equilibra.execute.kernels.shares import Part, shares_of
from equilibra.execute.moe.spec import Activation

if TYPE_CHECKING:
    from equilibra.execute.moe.expert_math import ExpertGradients, ExpertParts

__all__ = ["Groups", "backward", "forward", "serves"]

BM = 128
"""rows of a tile"""
MOST_UNIT = 1 << 20
"""bytes; of places in memory"""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel cuts its result, and runs."""

    bn: int
    """columns"""
    bk: int
    """inner dimension at a time"""
    warps: int
    """of a program"""
    stages: int
    """tiles on their way"""
    bm: int = BM
    """rows"""


FIRST = Tile(bn=128, bk=64, warps=8, stages=4)
PRODUCT = Tile(bn=256, bk=64, warps=8, stages=4)
WEIGHT = Tile(bn=256, bk=32, warps=8, stages=6)
DX = Tile(bn=256, bk=64, warps=8, stages=4)
"""beside WEIGHT, in one launch"""
SUM_COST, STORE_COST = 200, 60
"""what adding a tile to float32 sums takes, and what storing one does, in steps of the inner dimension"""
ELEMENTS = 2048
"""values of a program that works on one value at a time"""
SMALL = Tile(bn=32, bk=32, warps=4, stages=2, bm=BM)
"""for types of four bytes, whose tiles take twice the memory"""


def serves(rows_ND: Tensor, instances: Sequence[ExpertParts]) -> bool:
    """Whether these kernels compute such rows: on a GPU, in types that its matrix units know; Hopper or newer."""
    return (
        rows_ND.is_cuda
        and rows_ND.dtype in (torch.bfloat16, torch.float16)
        and bool(instances)
        and all(parts.gate_up.dtype == rows_ND.dtype for parts in instances)
        and all(size % 8 == 0 for size in instances[0].down.shape)
        and has_triton()
        and _has_room(rows_ND.device)
    )


@lru_cache(maxsize=64)
def _has_room(device: torch.device) -> bool:
    """Whether tiles fit: multiprocessors before Hopper have less memory, and no descriptors."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Where the rows of every instance are."""

    sizes: tuple[int, ...]
    """[I] rows of every instance"""
    num_rows: int
    """N"""
    num_tiles: int
    """tiles of rows"""
    tiles: Tensor
    """[3 * num_tiles] int32: instance, first row, end of the instance's rows"""
    offsets: Tensor
    """[I + 1] int32: first row of every instance"""

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> Groups:
        """From rows per instance."""
        rows = np.asarray(sizes, np.int64)
        offsets = np.concatenate([[0], np.cumsum(rows)])
        tiles_of_instance = -(-rows // BM)
        instance = np.repeat(np.arange(rows.size), tiles_of_instance)
        before = np.cumsum(tiles_of_instance) - tiles_of_instance
        first = offsets[instance] + (np.arange(instance.size) - before[instance]) * BM
        both = to_device(np.concatenate([instance, first, offsets[instance + 1], offsets]), device)
        return cls(
            sizes=sizes, num_rows=int(offsets[-1]), num_tiles=instance.size,
            tiles=both[: 3 * instance.size], offsets=both[3 * instance.size :],
        )  # fmt: skip


def to_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Small numbers, without waiting for the device."""
    host = torch.from_numpy(values.astype(np.int32))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Places(NamedTuple):
    """Where tensors of one shape lie, however far apart: kernels reach all of them from the lowest."""

    base: int
    """address of the lowest"""
    places: Tensor
    """[I] int32: distance from it, in units"""
    unit: int
    """values"""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Places:
        """Of tensors on one device."""
        like = tensors[0]
        return _places(tuple(tensor.data_ptr() for tensor in tensors), like.itemsize, like.device)


@lru_cache(maxsize=4096)
def _places(addresses: tuple[int, ...], itemsize: int, device: torch.device) -> Places:
    """Homes and slots stay where they are, so there are few tables."""
    base = min(addresses)
    apart = [address - base for address in addresses]
    together = gcd(MOST_UNIT, base, *apart)
    if max(apart) // together >= 2**31 - 1:
        raise ExecuteError(f"kernels cannot reach weights {max(apart)} bytes apart, in steps of {together} bytes")
    return Places(base, to_device(np.array(apart) // together, device), together // itemsize)


def forward(
    kind: Activation, rows_ND: Tensor, groups: Groups, instances: Sequence[ExpertParts], *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Results [N, D] and h [N, 2F], which is empty unless it is kept."""
    like, num_rows = instances[0], groups.num_rows
    width, inner = like.down.shape
    h = rows_ND.new_empty(num_rows if keep else 0, 2 * inner)
    a, y = rows_ND.new_empty(num_rows, inner), rows_ND.new_empty(num_rows, width)
    if num_rows:
        first_product(kind, groups, rows_ND, instances, h, a)
        product(groups, a, instances, "down", y, turned=True)
    return y, h


def backward(
    kind: Activation, saved: tuple[Tensor, Tensor, Tensor], groups: Groups, instances: Sequence[ExpertParts],
    gradients: Sequence[ExpertParts | ExpertGradients | None], dx_ND: Tensor, *, num_first: int = 0,
    num_last: int = 0, after_last: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """As `expert_math.backward`."""
    rows_ND, h, dy = saved
    a, dh = h.new_empty(groups.num_rows, h.shape[1] // 2), torch.empty_like(h)
    if groups.num_rows:
        product(groups, dy, instances, "down", a, turned=False)
        activation_gradient(kind, h, a, dh)
    learned = [wanted for wanted in gradients if wanted is not None]
    kept = slice(num_first, len(instances) - num_last)
    afresh = [*learned[: kept.start], *learned[kept.stop :]]
    if groups.num_rows and learned and (learned[0].down is not None or learned[0].gate_up is not None):
        weights_and_rows(groups, (dy, a, dh, rows_ND), instances, learned, kept, dx_ND)
    elif groups.num_rows:
        product(groups, dh, instances, "gate_up", dx_ND, turned=False)
    else:
        _zero([part for wanted in afresh for part in (wanted.down, wanted.gate_up) if part is not None])
    for left, name in ((dy, "down_bias"), (dh, "gate_up_bias")):
        biases = [getattr(wanted, name) for wanted in learned]
        if learned and biases[0] is not None:
            _zero([getattr(wanted, name) for wanted in afresh])
            bias_gradient(left, biases, groups.offsets)
    if after_last is not None:
        after_last()


class Shares(NamedTuple):
    """What every program of a launch computes."""

    work: Tensor
    """int32: numbers of tiles"""
    shares: Tensor
    """[P, 8] int32: as of `shares_of`"""
    num_programs: int
    """P"""

    @classmethod
    @lru_cache(maxsize=512)
    def of(cls, sizes: tuple[int, ...], width: int, inner: int, learned: tuple[bool, bool], tiles: tuple[Tile, Tile],
           device: torch.device) -> tuple[Shares, ...]:  # fmt: skip
        """Of all gradients of instances with so many rows: dW2, dW1 (if they are learned) and dx.

        Two launches, where instances have more tiles than there are programs: in the first, all programs are at tiles
        of the same instance all the time, which caches need where instances have many rows; the second has the rest.
        """
        weight, dx = tiles
        num_programs, rows = multiprocessors(device), np.asarray(sizes, np.int64)
        order = np.argsort(-rows, kind="stable")
        steps = np.maximum(-(-rows[order] // weight.bk), 1)
        costs, cost_of_dx = steps * weight.bk + SUM_COST, 2 * inner + STORE_COST
        num_dx = int((-(-rows // dx.bm)).sum()) * -(-width // dx.bn)
        filling = int(costs[0]) // cost_of_dx + 2  # tiles of dx in the time of the longest tile of weights
        rounds = max(num_dx // num_programs - filling, 0)
        launches, of_dx = [], 0
        each = np.array([_num_tiles(width, inner, weight), _num_tiles(2 * inner, width, weight)]) * learned
        together = each // num_programs * num_programs
        for counts, firsts in ((together, [0, 0]), (each - together, together)):
            groups = np.empty((2, order.size, 5), np.int64)
            groups[:, :, 0] = ((Part.DOWN,), (Part.GATE_UP,))
            groups[:, :, 1] = counts[:, None]
            groups[:, :, 2] = order * each[:, None] + np.reshape(firsts, (2, 1))
            groups[:, :, 3:] = np.stack([costs, steps], axis=1)
            is_last = counts is not together
            if is_last or counts.any():
                num = num_dx - of_dx if is_last else rounds * num_programs
                last = (Part.ROWS_AFTER, num, of_dx, cost_of_dx, 1)
                work, shares = shares_of(np.vstack([groups.reshape(-1, 5), last]), rounds, num_programs)
                both = to_device(np.concatenate([work, shares.ravel()]), device)
                launches.append(cls(both[: work.size], both[work.size :], num_programs))
                of_dx, rounds = num, 0
        return tuple(launches)


def _num_tiles(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.bm) * -(-columns // tile.bn)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:  # torch refuses an empty list
        torch._foreach_zero_(tensors)


# --- launches ---


def first_product(
    kind: Activation, groups: Groups, x: Tensor, instances: Sequence[ExpertParts], h: Tensor, a: Tensor
) -> None:
    """Write h, if it has room, and a, from rows."""
    tile, inner = _tile(FIRST, x), a.shape[1]
    grid, num = _grid(groups.num_tiles * -(-inner // tile.bn), x)
    _kernels().first_product[grid](
        x, *_weights_and_bias(instances, "gate_up"), h, a, groups.tiles, groups.num_tiles, x,
        D=x.shape[1], F=inner, BIAS=instances[0].gate_up_bias is not None, KEEP=len(h) > 0,
        CLAMPED=kind is Activation.CLAMPED_SWIGLU, NUM=num, **_sizes(tile, x),
    )  # fmt: skip


def product(
    groups: Groups, rows_NK: Tensor, instances: Sequence[ExpertParts], name: str, into_NC: Tensor, *, turned: bool
) -> None:
    """Write rows times a matrix: y from a (turned, with its bias), da from dy, dx from dh."""
    tile, columns = _tile(PRODUCT, rows_NK), into_NC.shape[1]
    grid, num = _grid(groups.num_tiles * -(-columns // tile.bn), rows_NK)
    _kernels().product[grid](
        rows_NK, *_weights_and_bias(instances, name), into_NC, groups.tiles, groups.num_tiles, rows_NK,
        K=rows_NK.shape[1], C=columns, TURNED=turned, BIAS=turned and instances[0].down_bias is not None, NUM=num,
        STAGES=tile.stages, **_sizes(tile, rows_NK),
    )  # fmt: skip


def activation_gradient(kind: Activation, h: Tensor, da: Tensor, dh: Tensor) -> None:
    """Write dh, from h and da, which becomes a. In one kernel with the product before it, it took longer."""
    _kernels().activation_gradient[(-(-da.numel() // ELEMENTS),)](
        h, da, dh, da.numel(), F=da.shape[1], CLAMPED=kind is Activation.CLAMPED_SWIGLU, BLOCK=ELEMENTS
    )


def weights_and_rows(
    groups: Groups, values: tuple[Tensor, Tensor, Tensor, Tensor], instances: Sequence[ExpertParts],
    learned: Sequence[ExpertParts | ExpertGradients], kept: slice, dx_ND: Tensor,
) -> None:  # fmt: skip
    """Write dx; add gradients of the weights that are kept, write the others afresh. values: dy, a, dh and rows."""
    dy, a = values[:2]
    tiles = _tile(WEIGHT, dy), _tile(DX, dy)
    sums = [[getattr(wanted, name) for wanted in learned] for name in ("down", "gate_up")]
    wanted = sums[0][0] is not None, sums[1][0] is not None
    weights = Places.of([parts.gate_up for parts in instances])
    down, gate_up = (Places.of(part) if want else weights for part, want in zip(sums, wanted, strict=True))
    sums_like = next(part[0] for part, want in zip(sums, wanted, strict=True) if want)
    for launch in Shares.of(groups.sizes, dy.shape[1], a.shape[1], wanted, tiles, dy.device):
        _kernels().gradients[(launch.num_programs,)](
            *values, dx_ND, *down, *gate_up, sums_like, *weights, groups.offsets, groups.tiles, groups.num_tiles,
            kept.start, kept.stop, launch.work, launch.shares, dy, D=dy.shape[1], F=a.shape[1], IN_MEMORY=dy.is_cuda,
            DX_BK=tiles[1].bk, DX_STAGES=tiles[1].stages, **_sizes(tiles[0], dy),
        )  # fmt: skip


def bias_gradient(left: Tensor, into: list[Tensor], offsets: Tensor) -> None:
    """Add column sums of every instance's rows."""
    _kernels().bias_gradient[(-(-left.shape[1] // 64), len(into))](
        left, *Places.of(into), offsets, into[0], A=left.shape[1], BN=64, BK=64
    )


def _weights_and_bias(instances: Sequence[ExpertParts], name: str) -> tuple[Any, ...]:
    """Places of both; those of the weights twice where there is no bias, which is not read then."""
    weights = Places.of([getattr(parts, name) for parts in instances])
    biases = [getattr(parts, f"{name}_bias") for parts in instances]
    return (*weights, *(weights if biases[0] is None else Places.of(biases)))


def _grid(num_tiles: int, like: Tensor) -> tuple[tuple[int], int]:
    """Programs of a launch, and how many tiles on each goes."""
    programs = multiprocessors(like.device)
    return (min(num_tiles, programs),), programs


def _kernels() -> Any:  # noqa: ANN401 - Triton's kernels have no type
    """The kernels; descriptors that they make need a little memory for each launch."""
    import triton  # noqa: PLC0415 - where there is no Triton, nothing comes here

    from equilibra.execute.kernels import products  # noqa: PLC0415

    triton.set_allocator(_allocate)  # it is kept for each thread, and the backward pass has threads of its own
    return products


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _tile(tile: Tile, like: Tensor) -> Tile:
    return tile if like.itemsize == 2 else SMALL


def _sizes(tile: Tile, like: Tensor) -> dict[str, Any]:
    return {
        "PRECISION": "tf32" if like.itemsize == 2 else "ieee", "BM": tile.bm, "BN": tile.bn, "BK": tile.bk,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
