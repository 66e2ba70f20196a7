"""Grouped matrix products, as Triton kernels.

Symbols: N rows, D width, F inner width, I instances; BM, BN, BK: sizes of a tile.

Rows are grouped by instance. Weights are found by a table of addresses, one per instance, so homes and copies are
computed by one launch and nothing is gathered into one tensor. A tile of rows never crosses instances; tiles are listed
by the host, which knows all sizes from the plan. Sums run over the inner dimension in one order whatever the tile, so a
row's result does not depend on what else is computed.

    first_product        h = x W1.T + b1, a = act(h)
    second_product       y = a W2.T + b2
    row_gradient         da = dy W2; dx = dh W1
    activation_gradient  dh = act'(h) da, a = act(h)
    weight_gradient      dW += left.T right, in float32, where gradients are summed
    bias_gradient        db += column sums

Activations are computed in float32 from h as it is stored, so the backward pass sees the same values. Descriptors are
made for the rows of one instance: what a tile reads beyond them is zero, what it writes there is left out.
"""
# Triton's language is not typed, and its constants are written in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import inspect

import triton
import triton.language as tl

__all__ = [
    "activation_gradient",
    "bias_gradient",
    "first_product",
    "row_gradient",
    "second_product",
    "weight_gradient",
]


TABLES = ["order", "weights", "biases", "gradients", "tiles", "offsets", "like"]


def _once_per_shape(kernel):
    """Compiled once for a shape, not again for a table that happens to lie elsewhere or a count of another kind."""
    names = inspect.signature(kernel).parameters
    counts, tables = [n for n in names if n == "num_tiles"], [n for n in TABLES if n in names]
    return triton.jit(do_not_specialize=counts, do_not_specialize_on_alignment=tables)(kernel)


@triton.jit
def _tile(tiles, tile, num_tiles):
    """A tile of rows: instance, first row, end of the instance's rows."""
    return tl.load(tiles + tile), tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)


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
    """Gradients of gate and up."""
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


@_once_per_shape
def first_product(
    x, weights, biases, h, a, tiles, num_tiles, like,
    D: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, CLAMPED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes h [N, 2F] (if KEEP) and a [N, F]; a tile has the same columns of both halves of h."""
    columns = tl.cdiv(F, BN)
    g, first, last = _tile(tiles, tl.program_id(0) // columns, num_tiles)
    col = (tl.program_id(0) % columns) * BN
    tiles_x = tl.make_tensor_descriptor(x, shape=[last, D], strides=[D, 1], block_shape=[BM, BK])
    weight = tl.load(weights + g).to(like.dtype)
    tiles_w = tl.make_tensor_descriptor(weight, shape=[2 * F, D], strides=[D, 1], block_shape=[BN, BK])
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        tile_x = tiles_x.load([first, k])
        gate = tl.dot(tile_x, tiles_w.load([col, k]).T, gate, input_precision=PRECISION)
        up = tl.dot(tile_x, tiles_w.load([F + col, k]).T, up, input_precision=PRECISION)
    if BIAS:
        cols = col + tl.arange(0, BN)
        bias = tl.load(biases + g).to(like.dtype)
        gate += tl.load(bias + cols, mask=cols < F, other=0.0)[None, :]
        up += tl.load(bias + F + cols, mask=cols < F, other=0.0)[None, :]
    gate, up = gate.to(a.dtype.element_ty), up.to(a.dtype.element_ty)
    if KEEP:
        _store(h, gate, first, last, col, F, 2 * F, BM, BN)
        _store(h + F, up, first, last, col, F, 2 * F, BM, BN)
    _store(a, _activate(gate.to(tl.float32), up.to(tl.float32), CLAMPED), first, last, col, F, F, BM, BN)


@_once_per_shape
def second_product(
    a, weights, biases, y, tiles, num_tiles, like,
    D: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes y [N, D]."""
    columns = tl.cdiv(D, BN)
    g, first, last = _tile(tiles, tl.program_id(0) // columns, num_tiles)
    col = (tl.program_id(0) % columns) * BN
    tiles_a = tl.make_tensor_descriptor(a, shape=[last, F], strides=[F, 1], block_shape=[BM, BK])
    weight = tl.load(weights + g).to(like.dtype)
    tiles_w = tl.make_tensor_descriptor(weight, shape=[D, F], strides=[F, 1], block_shape=[BN, BK])
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, F, BK):
        total = tl.dot(tiles_a.load([first, k]), tiles_w.load([col, k]).T, total, input_precision=PRECISION)
    if BIAS:
        cols = col + tl.arange(0, BN)
        bias = tl.load(biases + g).to(like.dtype)
        total += tl.load(bias + cols, mask=cols < D, other=0.0)[None, :]
    _store(y, total, first, last, col, D, D, BM, BN)


@_once_per_shape
def row_gradient(
    rows_NK, weights, into, tiles, num_tiles, like,
    K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes [N, C]: rows [N, K] times the weights [K, C]."""
    columns = tl.cdiv(C, BN)
    g, first, last = _tile(tiles, tl.program_id(0) // columns, num_tiles)
    col = (tl.program_id(0) % columns) * BN
    tiles_r = tl.make_tensor_descriptor(rows_NK, shape=[last, K], strides=[K, 1], block_shape=[BM, BK])
    weight = tl.load(weights + g).to(like.dtype)
    tiles_w = tl.make_tensor_descriptor(weight, shape=[K, C], strides=[C, 1], block_shape=[BK, BN])
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(tiles_r.load([first, k]), tiles_w.load([k, col]), total, input_precision=PRECISION)
    _store(into, total, first, last, col, C, C, BM, BN)


@triton.jit
def _store(into, values, first, last, col, C: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Rows up to the instance's last, columns up to C: what a descriptor of that shape clips."""
    tiles = tl.make_tensor_descriptor(into, shape=[last, C], strides=[STRIDE, 1], block_shape=[BM, BN])
    tiles.store([first, col], values.to(into.dtype.element_ty))


@triton.jit
def activation_gradient(h, da, dh, count, F: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes dh [N, 2F] from h and da [N, F], which becomes a; `count` values of da."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    both = (at // F) * (2 * F) + at % F
    gate = tl.load(h + both, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + both + F, mask=mask, other=0.0).to(tl.float32)
    dgate, dup = _activation_gradients(gate, up, tl.load(da + at, mask=mask, other=0.0).to(tl.float32), CLAMPED)
    tl.store(dh + both, dgate.to(dh.dtype.element_ty), mask=mask)
    tl.store(dh + both + F, dup.to(dh.dtype.element_ty), mask=mask)
    tl.store(da + at, _activate(gate, up, CLAMPED).to(da.dtype.element_ty), mask=mask)


@_once_per_shape
def weight_gradient(
    left, right, gradients, offsets, order, like,
    A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, FRESH: tl.constexpr, IN_MEMORY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds left.T right [A, B] of an instance's rows to its gradient; instances with most rows start first.

    If FRESH, it is written over whatever was there. If IN_MEMORY, sums are added by the memory, which saves waiting
    for what was there; nobody else adds to the same place meanwhile.
    """
    columns = tl.cdiv(B, BN)
    g, at = tl.load(order + tl.program_id(1)), tl.program_id(0)
    first, last = tl.load(offsets + g), tl.load(offsets + g + 1)
    if FRESH or first < last:
        left_col, right_col = (at // columns) * BM, (at % columns) * BN
        tiles_l = tl.make_tensor_descriptor(left, shape=[last, A], strides=[A, 1], block_shape=[BK, BM])
        tiles_r = tl.make_tensor_descriptor(right, shape=[last, B], strides=[B, 1], block_shape=[BK, BN])
        total = tl.zeros((BM, BN), tl.float32)
        for row in range(first, last, BK):
            tile_l = tiles_l.load([row, left_col])
            total = tl.dot(tile_l.T, tiles_r.load([row, right_col]), total, input_precision=PRECISION)
        into = tl.load(gradients + g).to(like.dtype)
        sums = tl.make_tensor_descriptor(into, shape=[A, B], strides=[B, 1], block_shape=[BM, BN])
        if FRESH:
            sums.store([left_col, right_col], total)
        elif IN_MEMORY:
            sums.atomic_add([left_col, right_col], total)
        else:
            sums.store([left_col, right_col], sums.load([left_col, right_col]) + total)


@_once_per_shape
def bias_gradient(rows_NA, gradients, offsets, like, A: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Adds the column sums [A] of an instance's rows to its gradient."""
    g = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = cols < A
    first, last = tl.load(offsets + g), tl.load(offsets + g + 1)
    if first < last:
        total = tl.zeros((BN,), tl.float32)
        for start in range(first, last, BK):
            rows = start + tl.arange(0, BK)
            at = rows_NA + rows[:, None].to(tl.int64) * A + cols[None, :]
            total += tl.sum(tl.load(at, mask=(rows < last)[:, None] & mask[None, :], other=0.0).to(tl.float32), axis=0)
        into = tl.load(gradients + g).to(like.dtype) + cols
        tl.store(into, tl.load(into, mask=mask, other=0.0) + total, mask=mask)
