"""Experts (two matrices with a gated activation between), forward and backward, for rows grouped by instance.

Symbols: N rows, D width, F inner width, I instances of experts on this rank.

The backward pass is written out, because autograd would keep the weights of copies, whose slots serve other layers in
between. It keeps the input and the first product of each row; gradients of row weights need no results:

    dw = dout . y = dout . (W2 a + b2) = (dout W2) . a + dout . b2

Every product covers one instance's rows, so its result does not depend on what else the rank computes. This file is the
reference; on GPUs, in 16-bit dtypes, `kernels.grouped` computes all instances at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from equilibra.execute.kernels import Activation, ExpertGradients, ExpertParts, RowWeights, grouped


def activate(kind: Activation, h_N2F: Tensor) -> Tensor:
    """[N, F] activation of the first product."""
    gate, up = h_N2F.chunk(2, dim=-1)
    if kind is Activation.SWIGLU:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def activation_gradient(kind: Activation, h_N2F: Tensor, da_NF: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and the gradient of its input; `da_NF` may be overwritten."""
    if kind is Activation.SWIGLU:  # what autograd would compute, without its graph and its copies of halves
        gate, up = h_N2F.chunk(2, dim=-1)
        dh = torch.empty_like(h_N2F)
        dgate, dup = dh.chunk(2, dim=-1)
        silu = functional.silu(gate)
        torch.mul(da_NF, silu, out=dup)
        torch.ops.aten.silu_backward.grad_input(da_NF.mul_(up), gate, grad_input=dgate)
        return silu.mul_(up), dh
    with torch.enable_grad():
        h = h_N2F.detach().requires_grad_()
        a = activate(kind, h)
    (dh,) = torch.autograd.grad(a, h, da_NF)
    return a.detach(), dh


def forward(
    kind: Activation, rows_ND: Tensor, sizes: Sequence[int], instances: Sequence[ExpertParts], *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Results [N, D], and the first product [N, 2F] for the backward pass (may be empty unless `keep`)."""
    if grouped.serves(rows_ND, instances):
        return grouped.forward(kind, rows_ND, grouped.Groups.of(tuple(sizes), rows_ND.device), instances, keep=keep)
    inner = instances[0].gate_up.shape[0]
    h, y = rows_ND.new_empty(rows_ND.shape[0], inner), torch.empty_like(rows_ND)
    for instance, span in _spans(sizes):
        parts = instances[instance]
        torch.mm(rows_ND[span], parts.gate_up.to(rows_ND.dtype).t(), out=h[span])
        if parts.gate_up_bias is not None:
            h[span] += parts.gate_up_bias.to(rows_ND.dtype)
        torch.mm(activate(kind, h[span]), parts.down.to(rows_ND.dtype).t(), out=y[span])
        if parts.down_bias is not None:
            y[span] += parts.down_bias.to(rows_ND.dtype)
    return y, h


def _spans(sizes: Sequence[int]) -> list[tuple[int, slice]]:
    """Number and row range of every instance that has rows."""
    ends = list(accumulate(sizes, initial=0))
    return [(i, slice(ends[i], ends[i + 1])) for i, size in enumerate(sizes) if size]


def backward(
    kind: Activation, saved: tuple[Tensor, Tensor, Tensor], sizes: Sequence[int], instances: Sequence[ExpertParts],
    gradients: Sequence[ExpertParts | ExpertGradients | None], dx_ND: Tensor, *, weighted: RowWeights | None = None,
    num_first: int = 0, num_last: int = 0, after_last: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write the rows' gradient into `dx_ND`, and add parameter gradients to `gradients` where not None.

    saved: rows [N, D], h [N, 2F] of the forward pass and the gradient of the (weighted) results [N, D]. Gradients of
    the first `num_first` and last `num_last` instances are overwritten, not added to; `after_last` is called once those
    of the last are ready.
    """
    if grouped.serves(saved[0], instances):
        groups = grouped.Groups.of(tuple(sizes), saved[0].device)
        grouped.backward(
            kind, saved, groups, instances, gradients, dx_ND, weighted=weighted, num_first=num_first, num_last=num_last,
            after_last=after_last,
        )  # fmt: skip
        return
    rows, h, dy = saved
    first = len(instances) - num_last
    afresh = [*gradients[:num_first], *gradients[first:]]
    for part in (part for wanted in afresh if wanted is not None for part in wanted if part is not None):
        part.zero_()
    for are_last in (True, False):
        for instance, span in _spans(sizes):
            if (instance >= first) is are_last:
                parts, wanted = instances[instance], gradients[instance]
                da = torch.mm(dy[span], parts.down.to(dy.dtype))
                weights = None if weighted is None else weighted.values_N[span, None]
                a, dh = activation_gradient(kind, h[span], da if weights is None else (da * weights).to(da.dtype))
                if weighted is not None and weights is not None:
                    weighted.gradients_N[span] = _gradient_of_weights(
                        dy[span], parts, a, da, weighted.gradients_N.dtype
                    )
                    a = (a * weights).to(a.dtype)
                torch.mm(dh, parts.gate_up.to(dy.dtype), out=dx_ND[span])
                if wanted is not None:
                    _add_products(wanted, (dy[span], a), (dh, rows[span]), weights)
        if are_last:
            after_last()


def _gradient_of_weights(dy_ND: Tensor, parts: ExpertParts, a_NF: Tensor, da_NF: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] dy . y, computed without y."""
    products_N: Tensor = torch.linalg.vecdot(da_NF.to(dtype), a_NF.to(dtype))
    return products_N if parts.down_bias is None else products_N + dy_ND.to(dtype) @ parts.down_bias.to(dtype)


def _add_products(
    wanted: ExpertParts | ExpertGradients, second: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor],
    weights_N1: Tensor | None,
) -> None:  # fmt: skip
    """Add gradients of both matrices from (gradient of the product, its weighted input), and of biases."""
    for weight, bias, (gradient, rows), weights in (
        (wanted.down, wanted.down_bias, second, weights_N1), (wanted.gate_up, wanted.gate_up_bias, first, None)
    ):  # fmt: skip
        if weight is not None:
            _add_product(weight, gradient, rows)
        if bias is not None:
            weighted = gradient if weights is None else gradient * weights
            bias.add_(weighted.sum(dim=0, dtype=bias.dtype))


def _add_product(into: Tensor, left_NA: Tensor, right_NB: Tensor) -> None:
    """Add left.T @ right; the product is rounded once if gradients are wider than rows."""
    if into.dtype == left_NA.dtype:
        into.addmm_(left_NA.t(), right_NB)
    else:
        into += torch.mm(left_NA.t(), right_NB)
