"""Grouped matrix products, as Triton kernels.

Symbols: N rows, D width, F inner width, I instances; BM, BN, BK: sizes of a tile.

    first_product        h = x W1.T + b1, a = act(h)
    product              y = a W2.T + b2; da = dy W2; dx = dh W1
    activation_gradient  dh = act'(h) w da, a = w act(h), dw = act(h) . da, where rows are weighted
    gradients            dW2 += dy.T a, dW1 += dh.T x, both in float32, where they are summed; dx = dh W1
    bias_gradient        db += column sums
    bias_products        dw += dy . b2

Rows are grouped by instance. A table of addresses finds each instance's weights, so one launch computes homes and
copies without gathering them. The host knows all sizes and lists the tiles; a tile never crosses instances. Sums run
over the inner dimension in one order, so a row's result does not depend on what else is computed. Activations are
computed in float32 from h as stored, so the backward pass sees the same values.

One program per multiprocessor takes tiles in turn and loads the next tile while it stores the last. So a descriptor
must reach every instance (`_rows`, `_places`).
"""
# Triton's language is not typed, and its constants are written in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import inspect

import triton
import triton.language as tl

COUNTS = ["num_tiles", "kept_from", "kept_to", "unit", "bias_unit", "down_unit", "gate_up_unit", "weights",
          "biases", "sums", "down_sums", "gate_up_sums"]  # fmt: skip
TABLES = ["places", "bias_places", "down_places", "gate_up_places", "tiles", "offsets", "work", "shares", "like",
          "sums_like", "weights_of_rows", "dweights"]  # fmt: skip
ANYWHERE, FAR = tl.constexpr(2**31 - 1), tl.constexpr(2**30)


def _once_per_shape(kernel):
    """Compile a kernel once per shape, whatever the alignment of its tables and the values of its counts."""
    names = inspect.signature(kernel).parameters
    counts, tables = [n for n in COUNTS if n in names], [n for n in TABLES if n in names]
    return triton.jit(do_not_specialize=counts, do_not_specialize_on_alignment=tables)(kernel)


@triton.jit
def _tile(tiles, num_tiles, t, columns):
    """The rows of tile t, as instance, first row and end of the instance's rows; and its column.

    Tiles are numbered band by band, and column by column within a band (see `Groups`), so that programs that run side
    by side share weights and find their rows in the cache.
    """
    at = t // columns
    top, height = tl.load(tiles + 3 * num_tiles + at), tl.load(tiles + 4 * num_tiles + at)
    inside = t - top * columns
    tile = top + inside % height
    instance, first = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    return instance, first, tl.load(tiles + 2 * num_tiles + tile), inside // height


@triton.jit
def _rows(values, C: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Rows [N, C] that end where an instance ends: row r of one that ends at e is [FAR, e, r + FAR - e].

    The second and third coordinate each step by a row. The third passes its bound, FAR, exactly from row e on: reads
    there give zero, writes are dropped. The first takes FAR rows back, because addresses wrap around at 2**64. (With a
    base FAR rows before the first it would not be needed, but the hardware requires a mapped base.)
    """
    return tl.make_tensor_descriptor(
        values, shape=[ANYWHERE, ANYWHERE, FAR, C], strides=[2**34 - STRIDE, STRIDE, STRIDE, 1],
        block_shape=[1, 1, BM, BN],
    )  # fmt: skip


@triton.jit
def _places(base, unit, like, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Matrices [R, C] anywhere in memory: the first coordinate steps by `unit` values from the lowest one."""
    return tl.make_tensor_descriptor(
        base.to(like.dtype), shape=[ANYWHERE, R, C], strides=[unit, C, 1], block_shape=[1, BR, BC]
    )


@triton.jit
def _halves(values, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(values, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _activate(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        a = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        a = gate * tl.sigmoid(gate) * up
    return a


@triton.jit
def _activation_gradients(gate, up, da, CLAMPED: tl.constexpr):
    if CLAMPED:
        inside_gate, inside_up = gate <= 7.0, (up >= -7.0) & (up <= 7.0)
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        s = tl.sigmoid(1.702 * gate)
        dgate = tl.where(inside_gate, da * (up + 1.0) * s * (1.0 + 1.702 * gate * (1.0 - s)), 0.0)
        dup = tl.where(inside_up, da * gate * s, 0.0)
    else:
        s = tl.sigmoid(gate)
        dgate = da * up * s * (1.0 + gate * (1.0 - s))
        dup = da * gate * s
    return dgate, dup


@triton.jit
def _bias(biases, places, g, unit, cols, end, like):
    bias = biases.to(like.dtype) + tl.load(places + g).to(tl.int64) * unit
    return tl.load(bias + cols, mask=cols < end, other=0.0)[None, :]


@_once_per_shape
def first_product(
    x, weights, places, unit, biases, bias_places, bias_unit, h, a, tiles, num_tiles, like,
    D: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, CLAMPED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Writes h [N, 2F] (if KEEP) and a [N, F]; a tile has the same columns of both halves of h, as one product."""
    tiles_x = _rows(x, D, D, BM, BK)
    tiles_a = _rows(a, F, F, BM, BN)
    tiles_gate, tiles_up = tiles_a, tiles_a
    if KEEP:
        tiles_gate, tiles_up = _rows(h, F, 2 * F, BM, BN), _rows(h + F, F, 2 * F, BM, BN)
    tiles_w = tl.make_tensor_descriptor(
        weights.to(like.dtype), shape=[ANYWHERE, 2, F, D], strides=[unit, F * D, D, 1], block_shape=[1, 2, BN, BK]
    )
    columns = tl.cdiv(F, BN)
    for t in tl.range(tl.program_id(0), num_tiles * columns, NUM, flatten=True):
        g, first, last, column = _tile(tiles, num_tiles, t, columns)
        row, col, place = first + FAR - last, column * BN, tl.load(places + g)
        both = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, D, BK):
            tile_x = tiles_x.load([FAR, last, row, k]).reshape(BM, BK)
            tile_w = tiles_w.load([place, 0, col, k]).reshape(2 * BN, BK)
            both = tl.dot(tile_x, tile_w.T, both, input_precision=PRECISION)
        gate, up = _halves(both, BM, 2 * BN)
        if BIAS:
            cols = col + tl.arange(0, BN)
            gate += _bias(biases, bias_places, g, bias_unit, cols, F, like)
            up += _bias(biases, bias_places, g, bias_unit, F + cols, F + tl.minimum(col + BN, F), like)
        gate, up = gate.to(a.dtype.element_ty), up.to(a.dtype.element_ty)
        if KEEP:
            tiles_gate.store([FAR, last, row, col], gate.reshape(1, 1, BM, BN))
            tiles_up.store([FAR, last, row, col], up.reshape(1, 1, BM, BN))
        values = _activate(gate.to(tl.float32), up.to(tl.float32), CLAMPED).to(a.dtype.element_ty)
        tiles_a.store([FAR, last, row, col], values.reshape(1, 1, BM, BN))


@triton.jit
def _multiply(
    tiles_r, tiles_w, tiles_i, places, biases, bias_places, bias_unit, tiles, num_tiles, like, work, begin, end,
    K: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, LISTED: tl.constexpr,
    HALVES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes tiles of [N, C]: rows [N, K] times the weights [K, C], which lie as [C, K] if TRANSPOSED.

    Every STEP-th tile from `begin` to `end`; if LISTED, of those that `work` names; if HALVES, the left (even) or the
    right half of a tile, whose columns are BN then.
    """
    WHOLE: tl.constexpr = 2 * BN if HALVES else BN
    columns = tl.cdiv(C, WHOLE)
    for t in tl.range(begin, end, STEP, num_stages=STAGES, flatten=True):
        if LISTED:
            t = tl.load(work + t)  # noqa: PLW2901
        if HALVES:
            g, first, last, column = _tile(tiles, num_tiles, t // 2, columns)
            col = column * WHOLE + (t % 2) * BN
        else:
            g, first, last, column = _tile(tiles, num_tiles, t, columns)
            col = column * BN
        row, place = first + FAR - last, tl.load(places + g)
        total = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            tile_r = tiles_r.load([FAR, last, row, k]).reshape(BM, BK)
            if TRANSPOSED:
                tile_w = tiles_w.load([place, col, k]).reshape(BN, BK).T
            else:
                tile_w = tiles_w.load([place, k, col]).reshape(BK, BN)
            total = tl.dot(tile_r, tile_w, total, input_precision=PRECISION)
        if BIAS:
            total += _bias(biases, bias_places, g, bias_unit, col + tl.arange(0, BN), C, like)
        if HALVES:
            tiles_i.store([FAR, last, row, col], total.to(tiles_i.dtype).reshape(1, 1, BM, BN))
        else:
            left, right = _halves(total.to(tiles_i.dtype), BM, BN)
            tiles_i.store([FAR, last, row, col], left.reshape(1, 1, BM, BN // 2))
            tiles_i.store([FAR, last, row, col + BN // 2], right.reshape(1, 1, BM, BN // 2))


@_once_per_shape
def product(
    rows_NK, weights, places, unit, biases, bias_places, bias_unit, into, tiles, num_tiles, like,
    K: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Writes [N, C]: rows [N, K] times the weights [K, C], which lie as [C, K] if TRANSPOSED."""
    tiles_w = _places(weights, unit, like, C, K, BN, BK) if TRANSPOSED else _places(weights, unit, like, K, C, BK, BN)
    _multiply(
        _rows(rows_NK, K, K, BM, BK), tiles_w, _rows(into, C, C, BM, BN // 2), places, biases, bias_places, bias_unit,
        tiles, num_tiles, like, tiles, tl.program_id(0), num_tiles * tl.cdiv(C, BN), K=K, C=C, TRANSPOSED=TRANSPOSED,
        BIAS=BIAS, LISTED=False, HALVES=False, PRECISION=PRECISION, BM=BM, BN=BN, BK=BK, STAGES=STAGES, STEP=NUM,
    )  # fmt: skip


@_once_per_shape
def activation_gradient(
    h, da, dh, weights_of_rows, dweights,
    F: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes dh [N, 2F] from h and da [N, F], which becomes a. A program has one row.

    If WEIGHTED, da is that of weighted rows, a becomes weighted too, and a row's weight gets its gradient: da . a,
    added to what is there if ADDED.
    """
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < F
        at, both = row * F + cols, row * (2 * F) + cols
        gate = tl.load(h + both, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h + both + F, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(da + at, mask=mask, other=0.0).to(tl.float32)
        a = _activate(gate, up, CLAMPED)
        if WEIGHTED:
            weight = tl.load(weights_of_rows + row)
            products += values * a
            values, a = values * weight, a * weight
        dgate, dup = _activation_gradients(gate, up, values, CLAMPED)
        tl.store(dh + both, dgate.to(dh.dtype.element_ty), mask=mask)
        tl.store(dh + both + F, dup.to(dh.dtype.element_ty), mask=mask)
        tl.store(da + at, a.to(da.dtype.element_ty), mask=mask)
    if WEIGHTED:
        total = tl.sum(products, axis=0)
        if ADDED:
            total += tl.load(dweights + row)
        tl.store(dweights + row, total)


@_once_per_shape
def bias_products(
    rows_NC, biases, places, unit, tiles, num_tiles, into, like, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Writes [N]: every row times its instance's bias."""
    t = tl.program_id(0)
    g, first, last = tl.load(tiles + t), tl.load(tiles + num_tiles + t), tl.load(tiles + 2 * num_tiles + t)
    row = first + tl.arange(0, BM)
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, C, BK):
        cols = start + tl.arange(0, BK)
        mask = (row < last)[:, None] & (cols < C)[None, :]
        values = tl.load(rows_NC + row[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32) * _bias(biases, places, g, unit, cols, C, like).to(tl.float32), axis=1)
    tl.store(into + row, total, mask=row < last)


@triton.jit
def _add_products(
    left, right, sums, places, unit, offsets, kept_from, kept_to, like, work, begin, num_steps,
    A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, IN_MEMORY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds left.T right [A, B] of instances' rows to their sums: the tiles that `work` names from `begin` on.

    Sums of instances before kept_from and from kept_to on are written over whatever was there. If IN_MEMORY, sums are
    added by the memory, which saves waiting for what was there; nobody else adds to the same place meanwhile.

    One loop over all steps of all tiles: Triton flattens loops only where each takes as many steps, and waits for
    memory at every tile if it does not. Conditions must be as they are for it to fetch ahead.
    """
    tiles_l, tiles_r = _rows(left, A, A, BK, BM), _rows(right, B, B, BK, BN)
    tiles_s = _places(sums, unit, like, A, B, BM, BN // 2)
    columns = tl.cdiv(B, BN)
    each = tl.cdiv(A, BM) * columns
    at, step, last_step = begin - 1, begin * 0, begin * 0
    g, first, last, place, row_of_sum, col = begin, begin, begin, begin, begin, begin
    total = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(num_steps):
        step = tl.where(step == last_step, 0, step + 1)
        if step == 0:
            at += 1
            t = tl.load(work + at)
            g = t // each
            last, place = tl.load(offsets + g + 1), tl.load(places + g)
            first = tl.load(offsets + g) + FAR - last
            rows = FAR.value - first  # a number: some of Triton's interpreters make a constant of constant - tensor
            last_step = tl.maximum(tl.cdiv(rows, BK), 1) - 1
            row_of_sum, col = ((t % each) // columns) * BM, (t % columns) * BN
        row = first + step * BK
        tile_l = tiles_l.load([FAR, last, row, row_of_sum]).reshape(BK, BM)
        tile_r = tiles_r.load([FAR, last, row, col]).reshape(BK, BN)
        total = tl.dot(tile_l.T, tile_r, total, input_precision=PRECISION)
        if step == last_step:
            one, two = _halves(total, BM, BN)
            one, two = one.reshape(1, BM, BN // 2), two.reshape(1, BM, BN // 2)
            if (g < kept_from) | (g >= kept_to):
                tiles_s.store([place, row_of_sum, col], one)
                tiles_s.store([place, row_of_sum, col + BN // 2], two)
            elif IN_MEMORY:
                tiles_s.atomic_add([place, row_of_sum, col], one)
                tiles_s.atomic_add([place, row_of_sum, col + BN // 2], two)
            else:
                tiles_s.store([place, row_of_sum, col], tiles_s.load([place, row_of_sum, col]) + one)
                tiles_s.store(
                    [place, row_of_sum, col + BN // 2], tiles_s.load([place, row_of_sum, col + BN // 2]) + two
                )
            total = tl.zeros((BM, BN), tl.float32)


@_once_per_shape
def gradients(
    dy, a, dh, x, dx, down_sums, down_places, down_unit, gate_up_sums, gate_up_places, gate_up_unit, sums_like,
    weights, places, unit, offsets, tiles, num_tiles, kept_from, kept_to, work, shares, like,
    D: tl.constexpr, F: tl.constexpr, IN_MEMORY: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DX_BK: tl.constexpr, DX_STAGES: tl.constexpr,
):  # fmt: skip
    """dW2 += dy.T a, dW1 += dh.T x, dx = dh W1: every program has its share of each (see `shares`)."""
    share = shares + tl.program_id(0) * 10  # two numbers for each of five parts
    tiles_r, tiles_i = _rows(dh, 2 * F, 2 * F, BM, DX_BK), _rows(dx, D, D, BM, BN // 2)
    tiles_w = _places(weights, unit, like, 2 * F, D, DX_BK, BN)
    _multiply(
        tiles_r, tiles_w, tiles_i, places, weights, places, unit, tiles, num_tiles, like, work, tl.load(share),
        tl.load(share) + tl.load(share + 1), K=2 * F, C=D, TRANSPOSED=False, BIAS=False, LISTED=True, HALVES=False,
        PRECISION=PRECISION, BM=BM, BN=BN, BK=DX_BK, STAGES=DX_STAGES, STEP=1,
    )  # fmt: skip
    _add_products(
        dy, a, down_sums, down_places, down_unit, offsets, kept_from, kept_to, sums_like, work, tl.load(share + 2),
        tl.load(share + 3), A=D, B=F, PRECISION=PRECISION, IN_MEMORY=IN_MEMORY, BM=BM, BN=BN, BK=BK,
    )  # fmt: skip
    _add_products(
        dh, x, gate_up_sums, gate_up_places, gate_up_unit, offsets, kept_from, kept_to, sums_like, work,
        tl.load(share + 4), tl.load(share + 5), A=2 * F, B=D, PRECISION=PRECISION, IN_MEMORY=IN_MEMORY, BM=BM, BN=BN,
        BK=BK,
    )  # fmt: skip
    _multiply(
        tiles_r, tiles_w, tiles_i, places, weights, places, unit, tiles, num_tiles, like, work, tl.load(share + 6),
        tl.load(share + 6) + tl.load(share + 7), K=2 * F, C=D, TRANSPOSED=False, BIAS=False, LISTED=True, HALVES=False,
        PRECISION=PRECISION, BM=BM, BN=BN, BK=DX_BK, STAGES=DX_STAGES, STEP=1,
    )  # fmt: skip
    if tl.load(share + 9) > 0:
        _multiply(
            tiles_r, _places(weights, unit, like, 2 * F, D, DX_BK, BN // 2), tiles_i, places, weights, places, unit,
            tiles, num_tiles, like, work, tl.load(share + 8), tl.load(share + 8) + tl.load(share + 9), K=2 * F, C=D,
            TRANSPOSED=False, BIAS=False, LISTED=True, HALVES=True, PRECISION=PRECISION, BM=BM, BN=BN // 2, BK=DX_BK,
            STAGES=DX_STAGES, STEP=1,
        )  # fmt: skip


@_once_per_shape
def bias_gradient(
    rows_NA, weights_of_rows, sums, places, unit, offsets, like,
    A: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds the column sums [A] of an instance's rows to its gradient; of weighted rows if WEIGHTED."""
    g = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = cols < A
    first, last = tl.load(offsets + g), tl.load(offsets + g + 1)
    if first < last:
        total = tl.zeros((BN,), tl.float32)
        for start in range(first, last, BK):
            rows = start + tl.arange(0, BK)
            at = rows_NA + rows[:, None].to(tl.int64) * A + cols[None, :]
            values = tl.load(at, mask=(rows < last)[:, None] & mask[None, :], other=0.0).to(tl.float32)
            if WEIGHTED:
                values *= tl.load(weights_of_rows + rows, mask=rows < last, other=0.0)[:, None]
            total += tl.sum(values, axis=0)
        into = sums.to(like.dtype) + tl.load(places + g).to(tl.int64) * unit + cols
        tl.store(into, tl.load(into, mask=mask, other=0.0) + total, mask=mask)
