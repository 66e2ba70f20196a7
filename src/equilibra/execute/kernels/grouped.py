"""The expert layer on a GPU: `expert_math`'s forward and backward pass as grouped products.

Symbols: N rows, D width, F inner width, I instances. Tables are made on the host, where sizes are known, and uploaded
asynchronously: nothing synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.execute.kernels import (
    Activation,
    ExpertGradients,
    ExpertParts,
    RowWeights,
    Upload,
    has_triton,
    launch,
    multiprocessors,
)
from equilibra.execute.kernels.shares import launches_of

TYPES = (torch.bfloat16, torch.float16)
BM = 128
"""rows of a tile"""
BAND = 8
"""approximate height, in tiles, of a band of rows that is computed column by column"""
MOST_UNIT = 1 << 20
"""bytes; largest unit of distances between tensors"""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Tile shape and launch parameters of a kernel."""

    bn: int
    """columns"""
    bk: int
    """inner dimension per step"""
    warps: int
    stages: int
    """pipeline stages"""
    bm: int = BM
    """rows"""


FIRST = Tile(bn=128, bk=64, warps=8, stages=4)
PRODUCT = Tile(bn=256, bk=64, warps=8, stages=4)
WEIGHT = Tile(bn=256, bk=32, warps=8, stages=6)
DX = replace(WEIGHT, bk=64, stages=4)
"""shares a launch with WEIGHT, so its tiles are equally large"""
SUM_COST, STORE_COST = 200, 60
"""cost of adding a tile to float32 sums and of storing one, in rows of a sum (the device's clock says 370 to 450, and
less for dx: see `measure_ends.py`; with those values programs end no sooner)"""
HALF_COST = 0.55
"""cost of half a tile of dx relative to a whole one, also where the half lies beyond the width"""
SMALL = Tile(bn=32, bk=32, warps=4, stages=2)
"""for 4-byte dtypes, whose tiles take twice the memory"""


def serves(rows_ND: Tensor, instances: Sequence[ExpertParts]) -> bool:
    """Whether these kernels support the rows: 16-bit dtypes on Hopper or newer."""
    return (
        _knows(rows_ND)
        and bool(instances)
        and all(parts.gate_up.dtype == rows_ND.dtype for parts in instances)
        and all(size % 8 == 0 for size in instances[0].down.shape)
    )


def _knows(rows_ND: Tensor) -> bool:
    return rows_ND.is_cuda and rows_ND.dtype in TYPES and has_triton() and _has_room(rows_ND.device)


@lru_cache(maxsize=64)
def _has_room(device: torch.device) -> bool:
    """Whether tiles fit: GPUs before Hopper have less shared memory and no tensor descriptors."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Rows of every instance, as tables on the device."""

    sizes: tuple[int, ...]
    """[I] rows of every instance"""
    num_rows: int
    """N"""
    num_tiles: int
    """tiles of rows"""
    table: Upload
    """tiles and offsets"""

    @property
    def tiles(self) -> Tensor:
        """[5 * num_tiles] int32: instance, first row, end of the instance's rows, first tile and number of its band."""
        return self.table.values[: 5 * self.num_tiles]

    @property
    def offsets(self) -> Tensor:
        """[I + 1] int32: first row of every instance."""
        return self.table.values[5 * self.num_tiles :]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> Groups:
        rows = np.asarray(sizes, np.int64)
        offsets = np.concatenate([[0], np.cumsum(rows)])
        tiles_of_instance = -(-rows // BM)
        instance = np.repeat(np.arange(rows.size), tiles_of_instance)
        before = np.cumsum(tiles_of_instance) - tiles_of_instance
        within = np.arange(instance.size) - before[instance]
        first = offsets[instance] + within * BM
        top, height = bands(within, tiles_of_instance[instance])
        parts = instance, first, offsets[instance + 1], before[instance] + top, height, offsets
        return cls(
            sizes=sizes, num_rows=int(offsets[-1]), num_tiles=instance.size, table=Upload(np.concatenate(parts), device)
        )


def bands(tile: NDArray[np.int64], count: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First tile and height of the band that a tile of an instance with `count` tiles is in. Bands are about equally
    high and never span two instances, whose weights programs could not share.
    """
    num = np.maximum((count + BAND // 2) // BAND, 1)
    band = ((tile + 1) * num - 1) // count
    top = band * count // num
    return top, (band + 1) * count // num - top


def expect(rows_ND: Tensor, sizes: Sequence[int]) -> None:
    """Upload tables ahead for rows like these, `sizes` per instance."""
    if _knows(rows_ND):
        Groups.of(tuple(sizes), rows_ND.device)


class Places(NamedTuple):
    """Addresses of tensors of one shape, relative to the lowest."""

    base: int
    """address of the lowest"""
    places: Tensor
    """[I] int32: distance from it, in units"""
    unit: int
    """values"""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Places:
        like = tensors[0]
        return _places(tuple(tensor.data_ptr() for tensor in tensors), like.itemsize, like.device)


@lru_cache(maxsize=4096)
def _places(addresses: tuple[int, ...], itemsize: int, device: torch.device) -> Places:
    """Cached: homes and slots keep their addresses."""
    base = min(addresses)
    apart = [address - base for address in addresses]
    together = gcd(MOST_UNIT, base, *apart)
    if max(apart) // together >= 2**31 - 1:
        raise ExecuteError(f"kernels cannot reach weights {max(apart)} bytes apart, in steps of {together} bytes")
    return Places(base, Upload(np.array(apart) // together, device).values, together // itemsize)


def forward(
    kind: Activation, rows_ND: Tensor, groups: Groups, instances: Sequence[ExpertParts], *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Results [N, D] and h [N, 2F], which is empty unless `keep`."""
    like, num_rows = instances[0], groups.num_rows
    width, inner = like.down.shape
    h = rows_ND.new_empty(num_rows if keep else 0, 2 * inner)
    a, y = rows_ND.new_empty(num_rows, inner), rows_ND.new_empty(num_rows, width)
    if num_rows:
        first_product(kind, groups, rows_ND, instances, h, a)
        product(groups, a, instances, "down", y, transposed=True)
        if keep:
            _shared_out(_share_task(groups, rows_ND, inner, learned=(True, True)))
    return y, h


def _share_task(groups: Groups, rows_ND: Tensor, inner: int, *, learned: tuple[bool, bool]) -> ShareTask:
    tiles = _tile(WEIGHT, rows_ND), _tile(DX, rows_ND)
    return ShareTask(groups.sizes, rows_ND.shape[1], inner, learned, tiles, multiprocessors(rows_ND.device))


def backward(
    kind: Activation, saved: tuple[Tensor, Tensor, Tensor], groups: Groups, instances: Sequence[ExpertParts],
    gradients: Sequence[ExpertParts | ExpertGradients | None], dx_ND: Tensor, *, weighted: RowWeights | None = None,
    num_first: int = 0, num_last: int = 0, after_last: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """The same as `expert_math.backward`, all instances at once."""
    rows_ND, h, dy = saved
    a, dh = h.new_empty(groups.num_rows, h.shape[1] // 2), torch.empty_like(h)
    learned = [wanted for wanted in gradients if wanted is not None]
    weights = bool(learned) and learned[0].down is not None, bool(learned) and learned[0].gate_up is not None
    launches: tuple[Shares, ...] = ()
    if groups.num_rows:
        if any(weights):  # tables travel beside the first product
            launches = Shares.of(_share_task(groups, dy, a.shape[1], learned=weights), dy.device)
        product(groups, dy, instances, "down", a, transposed=False)
        if weighted is not None and instances[0].down_bias is not None:
            bias_products(groups, dy, instances, weighted.gradients_N)
        activation_gradient(kind, h, a, dh, weighted, added=instances[0].down_bias is not None)
    kept = slice(num_first, len(instances) - num_last)
    afresh = [*learned[: kept.start], *learned[kept.stop :]]
    if launches:
        weights_and_rows(launches, groups, (dy, a, dh, rows_ND), instances, learned, kept, dx_ND)
    elif groups.num_rows:
        product(groups, dh, instances, "gate_up", dx_ND, transposed=False)
    else:
        _zero([part for wanted in afresh for part in (wanted.down, wanted.gate_up) if part is not None])
    for left, name, weights_N in ((dy, "down_bias", weighted and weighted.values_N), (dh, "gate_up_bias", None)):
        biases = [getattr(wanted, name) for wanted in learned]
        if learned and biases[0] is not None:
            _zero([getattr(wanted, name) for wanted in afresh])
            bias_gradient(left, biases, groups.offsets, weights_N)
    if after_last is not None:
        after_last()


class Shares(NamedTuple):
    """Tiles that every program of a launch computes."""

    table: Upload
    """numbers of tiles, then shares"""
    num_tiles: int
    """of the launch"""
    num_programs: int
    """P"""

    @property
    def work(self) -> Tensor:
        return self.table.values[: self.num_tiles]

    @property
    def shares(self) -> Tensor:
        """[P * 10] int32: as of `shares_of`."""
        return self.table.values[self.num_tiles :]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, task: ShareTask, device: torch.device) -> tuple[Shares, ...]:
        """Tables on a device, one per launch."""
        first_work, first_shares, work, shares = _shared_out(task).result()
        found = []
        for of_launch, table in ((first_work, first_shares), (work, shares)):
            if of_launch.size:
                numbers = np.concatenate([of_launch, table.ravel()])
                found.append(cls(Upload(numbers, device), of_launch.size, task.num_programs))
        return tuple(found)


class ShareTask(NamedTuple):
    """Input of `launches_of`: all gradients of instances with these rows."""

    sizes: tuple[int, ...]
    """rows of every instance"""
    width: int
    """D"""
    inner: int
    """F"""
    learned: tuple[bool, bool]
    """whether W2 and W1 are trained"""
    tiles: tuple[Tile, Tile]
    """of weights and of dx"""
    num_programs: int
    """P"""

    def share_out(self) -> tuple[NDArray[np.int32], ...]:
        weight, dx = self.tiles
        each = [_num_tiles(self.width, self.inner, weight), _num_tiles(2 * self.inner, self.width, weight)]
        num_dx = sum(-(-size // dx.bm) for size in self.sizes) * -(-self.width // dx.bn)
        found: tuple[NDArray[np.int32], ...] = launches_of(
            np.array(self.sizes, np.int64), np.array(each) * self.learned, num_dx, weight.bk, SUM_COST,
            2 * self.inner + STORE_COST, int(2 * self.inner * HALF_COST) + STORE_COST, self.num_programs,
        )  # fmt: skip
        return found


@lru_cache(maxsize=512)
def _shared_out(task: ShareTask) -> Future[tuple[NDArray[np.int32], ...]]:
    """Computed in the background: the forward pass requests it for the backward pass."""
    return _background().submit(task.share_out)


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="equilibra-shares")


def _num_tiles(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.bm) * -(-columns // tile.bn)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:  # torch refuses an empty list
        torch._foreach_zero_(tensors)


# --- launches ---


def first_product(
    kind: Activation, groups: Groups, x: Tensor, instances: Sequence[ExpertParts], h: Tensor, a: Tensor
) -> None:
    """Write h (unless it is empty) and a from rows."""
    tile, inner = _tile(FIRST, x), a.shape[1]
    grid, num = _grid(groups.num_tiles * -(-inner // tile.bn), x)
    launch(
        _kernels().first_product, grid, x,
        x, *_weights_and_bias(instances, "gate_up"), h, a, groups.tiles, groups.num_tiles, x,
        D=x.shape[1], F=inner, BIAS=instances[0].gate_up_bias is not None, KEEP=len(h) > 0,
        CLAMPED=kind is Activation.CLAMPED_SWIGLU, NUM=num, **_sizes(tile, x),
    )  # fmt: skip


def product(
    groups: Groups, rows_NK: Tensor, instances: Sequence[ExpertParts], name: str, into_NC: Tensor, *, transposed: bool
) -> None:
    """Write rows times a matrix: y from a (transposed, with its bias), da from dy, dx from dh."""
    tile, columns = _tile(PRODUCT, rows_NK), into_NC.shape[1]
    grid, num = _grid(groups.num_tiles * -(-columns // tile.bn), rows_NK)
    launch(
        _kernels().product, grid, rows_NK,
        rows_NK, *_weights_and_bias(instances, name), into_NC, groups.tiles, groups.num_tiles, rows_NK,
        K=rows_NK.shape[1], C=columns, TRANSPOSED=transposed, BIAS=transposed and instances[0].down_bias is not None,
        NUM=num, STAGES=tile.stages, **_sizes(tile, rows_NK),
    )  # fmt: skip


def activation_gradient(
    kind: Activation, h: Tensor, da: Tensor, dh: Tensor, weighted: RowWeights | None = None, *, added: bool = False
) -> None:
    """Write dh from h and da, overwrite da with a, and write (or add) gradients of row weights.

    Fusing it with the product before was slower.
    """
    weights, dweights = (da, da) if weighted is None else weighted
    block = 2048 if 1024 < da.shape[1] <= 2048 else 1024  # values at a time: few are beyond the row's end
    launch(
        _kernels().activation_gradient, (len(da),), da,
        h, da, dh, weights, dweights, F=da.shape[1], CLAMPED=kind is Activation.CLAMPED_SWIGLU,
        WEIGHTED=weighted is not None, ADDED=added, BLOCK=block, num_warps=block // 256,
    )  # fmt: skip


def bias_products(groups: Groups, dy: Tensor, instances: Sequence[ExpertParts], into_N: Tensor) -> None:
    """Write every row's product with its instance's bias."""
    biases = [parts.down_bias for parts in instances if parts.down_bias is not None]
    launch(
        _kernels().bias_products, (groups.num_tiles,), dy,
        dy, *Places.of(biases), groups.tiles, groups.num_tiles, into_N,
        dy, C=dy.shape[1], BM=BM, BK=64,
    )  # fmt: skip


def weights_and_rows(
    launches: Sequence[Shares], groups: Groups, values: tuple[Tensor, Tensor, Tensor, Tensor],
    instances: Sequence[ExpertParts], learned: Sequence[ExpertParts | ExpertGradients], kept: slice, dx_ND: Tensor,
) -> None:  # fmt: skip
    """Write dx; add to gradients of the instances in `kept`, overwrite the others. values: dy, a, dh and rows."""
    dy, a = values[:2]
    sums = [[getattr(wanted, name) for wanted in learned] for name in ("down", "gate_up")]
    wanted = sums[0][0] is not None, sums[1][0] is not None
    weights = Places.of([parts.gate_up for parts in instances])
    down, gate_up = (Places.of(part) if want else weights for part, want in zip(sums, wanted, strict=True))
    sums_like = next(part[0] for part, want in zip(sums, wanted, strict=True) if want)
    weight, dx = _tile(WEIGHT, dy), _tile(DX, dy)
    for share in launches:
        launch(
            _kernels().gradients, (share.num_programs,), dy,
            *values, dx_ND, *down, *gate_up, sums_like, *weights, groups.offsets, groups.tiles, groups.num_tiles,
            kept.start, kept.stop, share.work, share.shares, dy, D=dy.shape[1], F=a.shape[1], IN_MEMORY=dy.is_cuda,
            DX_BK=dx.bk, DX_STAGES=dx.stages, **_sizes(weight, dy),
        )  # fmt: skip


def bias_gradient(left: Tensor, into: list[Tensor], offsets: Tensor, weights_N: Tensor | None) -> None:
    """Add the (weighted) column sums of every instance's rows."""
    launch(
        _kernels().bias_gradient, (-(-left.shape[1] // 64), len(into)), left,
        left, left if weights_N is None else weights_N, *Places.of(into), offsets, into[0], A=left.shape[1],
        WEIGHTED=weights_N is not None, BN=64, BK=64,
    )  # fmt: skip


def _weights_and_bias(instances: Sequence[ExpertParts], name: str) -> tuple[Any, ...]:
    """Places of weights and biases; the weights' again where there is no bias, which kernels then do not read."""
    weights = Places.of([getattr(parts, name) for parts in instances])
    biases = [getattr(parts, f"{name}_bias") for parts in instances]
    return (*weights, *(weights if biases[0] is None else Places.of(biases)))


def _grid(num_tiles: int, like: Tensor) -> tuple[tuple[int], int]:
    """Grid of a launch, and the stride of a program's tiles."""
    programs = multiprocessors(like.device)
    return (min(num_tiles, programs),), programs


def _kernels() -> Any:  # noqa: ANN401 - Triton's kernels have no type
    """The kernels' module, with an allocator for the descriptors they make."""
    import triton  # noqa: PLC0415 - where there is no Triton, nothing comes here

    from equilibra.execute.kernels import products  # noqa: PLC0415

    triton.set_allocator(_allocate)  # per thread, and the backward pass has its own threads
    return products


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())  # where `launch` launches


def _tile(tile: Tile, like: Tensor) -> Tile:
    return tile if like.itemsize == 2 else SMALL


def _sizes(tile: Tile, like: Tensor) -> dict[str, Any]:
    return {
        "PRECISION": "tf32" if like.itemsize == 2 else "ieee", "BM": tile.bm, "BN": tile.bn, "BK": tile.bk,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
