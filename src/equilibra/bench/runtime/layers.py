"""The layers of one rank of the runtime bench, and the step that every contender runs.

A step is what training does with a rollout: arm the plan; a forward pass of every micro-batch (log-prob); forward and
backward of every micro-batch (update); gradients of copies home. It starts with all ranks together; its time is that of
the slower rank. Weights count as changed before every step, so copies are fetched anew. Gradients are set to zero
outside of the measured time, in place, for all contenders alike.
"""

from __future__ import annotations

import gc

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equilibra.bench.runtime.case import CLUSTER, Case, Routing, Shape
from equilibra.bench.runtime.contenders import Contender
from equilibra.bench.runtime.plain_moe import PlainMoE
from equilibra.core.placement import contiguous
from equilibra.core.plan import GroupPlan, Stage
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.group import ExpertGroup
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.moe.layer import BalancedMoE
from equilibra.execute.runtime import CopySetting, Runtime

__all__ = ["RankLayers"]


class RankLayers:
    """The same experts and routers under the runtime and in plain layers."""

    def __init__(self, case: Case, shape: Shape, group: ExpertGroup) -> None:
        self.group, load = group, case.load
        spec = MoESpec(hidden=shape.hidden, expert_ffn=shape.ffn, num_experts=load.num_experts, top_k=case.top_k)
        homes = contiguous(CLUSTER, num_layers=load.num_layers, num_experts=load.num_experts)
        setting = CopySetting(spare_slots=shape.spare_slots, path=dict.fromkeys(Stage, Path(shape.path)))
        self.runtime = Runtime(group, homes, setting)
        torch.manual_seed(shape.seed)  # the routers must be the same on all ranks, the experts must not
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
        """Of all experts at home and of all routers."""
        parameters = [part for layer in self.balanced for part in (*layer.experts.parts(), layer.router.weight)]
        return [part.grad for part in parameters if part.grad is not None]

    def prepare(self) -> None:
        """The state before a step: new weights as far as the runtime knows, gradients zero, nothing under way."""
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
    """In the update a gradient is wanted of it, as below other layers: without, plain autograd leaves work out."""
    return hidden_TD.detach().requires_grad_(stage is Stage.UPDATE)


def _finish(hidden: Tensor, stage: Stage, outputs: list[Tensor] | None) -> None:
    if outputs is not None:
        outputs.append(hidden.detach())
    if stage is Stage.UPDATE:
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]
