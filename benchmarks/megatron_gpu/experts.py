"""Experts for Megatron's MoE layer on our grouped kernels, in place of Transformer Engine's.

Symbols: N rows, D width, F inner width, I experts of this module.

Parameters have the names and shapes of Megatron's TEGroupedMLP. In 16-bit dtypes on a GPU all experts are one launch
per product (`kernels.grouped`), elsewhere one product per expert. With gradient-accumulation fusion the kernels add
weight gradients to main_grad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.megatron_gpu.clock import Spans
from equilibra.execute.experts import expert_math
from equilibra.execute.kernels import Activation, ExpertGradients, ExpertParts, RowWeights


class GroupedExperts(nn.Module):
    """The experts of a rank, or its copy slots."""

    spans: Spans | None = None
    """records the products of all modules, where set"""
    copies_learn = True
    """False: the control, in which gradients of copies are lost"""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:  # noqa: ANN401, ARG002
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        self.tp_group = pg_collection.expt_tp
        width, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = _matrices(num_local_experts, (2 * inner, width), config)
        self.linear_fc2 = _matrices(num_local_experts, (width, inner), config)

    def forward(self, rows_ND: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        """Results of rows that are ordered by expert, times their probabilities."""
        sizes = tuple(int(size) for size in tokens_per_expert.tolist())
        weights = [
            getattr(part, f"weight{i}") for part in (self.linear_fc1, self.linear_fc2) for i in range(len(sizes))
        ]
        fused = bool(self.config.gradient_accumulation_fusion)

        def products(rows: Tensor) -> Tensor:
            how = sizes, fused, torch.is_grad_enabled()
            result: Tensor = _Experts.apply(rows, probs_N, how, *weights)  # type: ignore[no-untyped-call]
            return result

        return (products(rows_ND) if self.spans is None else self.spans.around(products, rows_ND)), None

    def backward_dw(self) -> None:
        """Does nothing: backward has computed all gradients."""


def _matrices(count: int, shape: tuple[int, int], config: Any) -> nn.Module:  # noqa: ANN401
    part = nn.Module()
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    for number in range(count):
        weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        weight.allreduce = False  # type: ignore[attr-defined] # Megatron: belongs to expert parallelism
        part.register_parameter(f"weight{number}", weight)
    return part


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probs: Tensor, how: tuple[tuple[int, ...], bool, bool], *weights: Tensor  # noqa: ANN401
    ) -> Tensor:  # fmt: skip
        sizes, fused, keep = how
        y, h = expert_math.forward(Activation.SWIGLU, rows, sizes, _parts(weights), keep=keep)
        ctx.save_for_backward(rows, h, probs, *weights)  # weights too: hooks may fetch copies again
        ctx.sizes, ctx.fused = sizes, fused
        return y.mul_(probs[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401
        rows, h, probs, *weights = ctx.saved_tensors
        in_place = ctx.fused and all(hasattr(one, "main_grad") for one in weights)
        wide = torch.promote_types(rows.dtype, torch.float32)  # the kernels sum in float32
        found = [one.main_grad if in_place else torch.empty_like(one, dtype=wide) for one in weights]
        dx, dprobs = torch.empty_like(rows), torch.empty_like(probs, dtype=torch.float32)
        expert_math.backward(
            Activation.SWIGLU, (rows, h, grad.contiguous()), ctx.sizes, _parts(weights),
            [ExpertGradients(gate_up=one.gate_up, down=one.down) for one in _parts(found)], dx,
            weighted=RowWeights(probs.float(), dprobs), num_first=0 if in_place else len(ctx.sizes),
        )  # fmt: skip
        if not GroupedExperts.copies_learn and not isinstance(weights[0], nn.Parameter):
            found = [torch.zeros_like(one) for one in found]
        if in_place:
            for one in weights:
                one.grad_added_to_main_grad = True
            found = [torch.empty_like(one) for one in weights]  # ignored, but hooks want one, as of Megatron's own
        found = [gradient.to(one.dtype) for gradient, one in zip(found, weights, strict=True)]
        return dx, dprobs.to(probs.dtype), None, *found


def _parts(weights: Any) -> list[ExpertParts]:  # noqa: ANN401
    half = len(weights) // 2
    return [ExpertParts(gate_up=weights[i], down=weights[half + i]) for i in range(half)]
