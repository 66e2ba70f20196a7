"""The layers of one rank of the runtime bench, and the step that every contender runs.

A step is what training does with a rollout: arm the plan; a forward pass of every micro-batch (log-prob); forward and
backward of every micro-batch (update); return the gradients of copies. All ranks start it together; its time is that of
the slower rank. Weights count as changed before every step, so copies are fetched anew. Gradients are zeroed in place
outside the measured time, for all contenders alike.

Beside them runs a plain expert-parallel layer without a plan, the baseline for the runtime's overhead. Symbols: T
tokens of this rank, K experts per token, E experts, R ranks, H = E / R homes per rank, N rows, D width.

    router -> sort pairs by expert -> all-to-all of counts -> all-to-all of rows -> experts one by one
    -> all-to-all back -> weighted sum

It is the usual implementation, and no slower than necessary: homes are contiguous, every expert has its own parameters,
gradients are autograd's. Weights, gradients and router are those of a `BalancedMoE`, so both compute the same in the
same memory.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.runtime.case import CLUSTER, Case, Routing, Shape
from benchmarks.runtime.contenders import Contender
from equilibra.core.placement import contiguous
from equilibra.core.plan import GroupPlan, Stage
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import MoESpec
from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import ExpertGroup
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.moe import BalancedMoE, Router
from equilibra.execute.runtime import CopySetting, Runtime


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; their gradients travel back the same way."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:  # noqa: ANN401
        ctx.sizes = sent, received
        return _exchange(rows_ND, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:  # noqa: ANN401
        sent, received = ctx.sizes
        return _exchange(gradients[0].contiguous(), received, sent), None, None


def _all_to_all(rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result: Tensor = _AllToAll.apply(rows_ND, sent, received)  # type: ignore[no-untyped-call]
    return result


def _exchange(rows_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result = rows_ND.new_empty(sum(received), rows_ND.shape[1])
    dist.all_to_all_single(result, rows_ND, received, sent)
    return result


class PlainMoE(nn.Module):
    """One layer without a plan, over the default process group."""

    def __init__(self, router: Router, experts: ExpertWeights) -> None:
        super().__init__()
        self.router, self.spec = router, experts.spec
        self.num_ranks = dist.get_world_size()
        self.stacked = {name: experts.get_parameter(name) for name in experts.names}
        for name, stack in self.stacked.items():
            parts = [nn.Parameter(part) for part in stack.detach().unbind(0)]  # views that share its memory
            setattr(self, f"{name}_of_home", nn.ParameterList(parts))

    def share_gradients(self) -> None:
        """Sum gradients into the existing ones of the stacked weights."""
        for name, stack in self.stacked.items():
            assert stack.grad is not None
            for parameter, gradient in zip(getattr(self, f"{name}_of_home"), stack.grad.unbind(0), strict=True):
                parameter.grad = gradient

    def forward(self, tokens_TD: Tensor, recorded_TK: Tensor) -> Tensor:
        """Results [T, D] of tokens whose experts are given."""
        experts_TK, weights_TK = self.router(tokens_TD, recorded_TK)
        pair_of_row = experts_TK.flatten().argsort(stable=True)
        token_of_row = pair_of_row // self.spec.top_k
        told = experts_TK.flatten().bincount(minlength=self.spec.num_experts)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told)
        sent, received = (counts.view(self.num_ranks, -1).sum(dim=1).tolist() for counts in (told, heard))
        rows = _all_to_all(tokens_TD.index_select(0, token_of_row), sent, received)
        heard_RH = heard.view(self.num_ranks, -1)
        home_of_row = torch.arange(heard_RH.shape[1]).repeat(self.num_ranks).repeat_interleave(heard)
        grouped = home_of_row.argsort(stable=True)
        results = self._experts(rows.index_select(0, grouped), heard_RH.sum(dim=0).tolist())
        returned = _all_to_all(results.index_select(0, grouped.argsort()), received, sent)
        weighted = returned * weights_TK.flatten().index_select(0, pair_of_row)[:, None]
        return torch.zeros_like(tokens_TD).index_add(0, token_of_row, weighted)

    def _experts(self, rows_ND: Tensor, sizes: list[int]) -> Tensor:
        """One expert after another."""
        results = []
        for home, rows in enumerate(torch.split(rows_ND, sizes)):
            if len(rows):
                biases = [self._part(name, home) for name in ("gate_up_bias", "down_bias")]
                h = linear(rows, self.gate_up_of_home[home], biases[0])  # type: ignore[index]
                results.append(linear(activate(self.spec.activation, h), self.down_of_home[home], biases[1]))  # type: ignore[index]
        return torch.cat(results) if results else rows_ND

    def _part(self, name: str, home: int) -> Tensor | None:
        return getattr(self, f"{name}_of_home")[home] if name in self.stacked else None


class RankLayers:
    """The same experts and routers under the runtime and in plain layers."""

    def __init__(self, case: Case, shape: Shape, group: ExpertGroup) -> None:
        self.group, load = group, case.load
        spec = MoESpec(hidden=shape.hidden, expert_ffn=shape.ffn, num_experts=load.num_experts, top_k=case.top_k)
        homes = contiguous(CLUSTER, num_layers=load.num_layers, num_experts=load.num_experts)
        setting = CopySetting(spare_slots=shape.spare_slots, path=dict.fromkeys(Stage, Path(shape.path)))
        self.runtime = Runtime(group, homes, setting)
        torch.manual_seed(shape.seed)  # routers must be equal on all ranks, experts different
        self.balanced = [BalancedMoE(spec, self.runtime) for _ in range(load.num_layers)]
        torch.manual_seed(shape.seed + 1 + group.rank)
        for layer in self.balanced:
            for part in layer.experts.parts():
                nn.init.normal_(part, std=0.02)
                part.grad = torch.zeros_like(part)
        self.plain = [PlainMoE(layer.router, layer.experts) for layer in self.balanced]
        for plain in self.plain:
            plain.share_gradients()
        self.hidden_M = [torch.randn(len(ranks[group.rank]), shape.hidden) for ranks in case.experts_MR]

    def balanced_step(self, contender: Contender, outputs: list[Tensor] | None = None) -> None:
        """One step of the runtime under a contender's plan."""
        runtime, micro_batches = self.runtime, list(range(len(self.hidden_M)))
        runtime.arm(GroupPlan(plan=contender.plan, load=contender.load, micro_batches=micro_batches))
        for stage in Stage:
            for m in micro_batches:
                micro_batch = MicroBatch(
                    runtime, stage=stage, number=m, sequences=np.zeros(0, np.int64),
                    experts_TLK=contender.experts_MR[m][self.group.rank], planned=True,
                )  # fmt: skip
                with micro_batch, torch.set_grad_enabled(stage is Stage.UPDATE):
                    hidden = _input(self.hidden_M[m], stage)
                    for layer in self.balanced:
                        hidden = hidden + layer(hidden)
                    _finish(hidden, stage, outputs)
        runtime.finish_gradients()

    def plain_step(self, experts_MR: Routing, outputs: list[Tensor] | None = None) -> None:
        """The same step of plain layers."""
        for stage in Stage:
            for m, hidden_TD in enumerate(self.hidden_M):
                experts_TLK = torch.from_numpy(experts_MR[m][self.group.rank])
                with torch.set_grad_enabled(stage is Stage.UPDATE):
                    hidden = _input(hidden_TD, stage)
                    for layer, plain in enumerate(self.plain):
                        hidden = hidden + plain(hidden, experts_TLK[:, layer])
                    _finish(hidden, stage, outputs)

    def gradients(self) -> list[Tensor]:
        """Gradients of all home experts and all routers."""
        parameters = [part for layer in self.balanced for part in (*layer.experts.parts(), layer.router.weight)]
        return [part.grad for part in parameters if part.grad is not None]

    def prepare(self) -> None:
        """Reset before a step: weights count as new, gradients are zero, nothing is in transit."""
        self.runtime.disarm()
        self.runtime.weights_changed()
        for gradient in self.gradients():
            gradient.zero_()
        gc.collect()
        self.runtime.recorder.begin_step(self.runtime.gpu)
        self.group.barrier(what="starting a step")

    def largest(self, value: float) -> float:
        """The largest value of all ranks."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)


def _input(hidden_TD: Tensor, stage: Stage) -> Tensor:
    """Input of the layers; in the update it needs a gradient, or plain autograd would skip work."""
    return hidden_TD.detach().requires_grad_(stage is Stage.UPDATE)


def _finish(hidden: Tensor, stage: Stage, outputs: list[Tensor] | None) -> None:
    if outputs is not None:
        outputs.append(hidden.detach())
    if stage is Stage.UPDATE:
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]
