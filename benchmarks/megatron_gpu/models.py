"""Megatron's models for a case: built, initialised, and trained one optimizer step at a time.

Symbols: M micro-batches, L MoE layers, T tokens of this rank, K experts per token.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import record_function

from benchmarks.megatron_gpu.cases import Case, Shape
from benchmarks.megatron_gpu.clock import Spans
from benchmarks.megatron_gpu.experts import GroupedExperts
from equilibra.integrations.megatron import MegatronSetting, balance

LEARNING_RATE, EPSILON = 1e-3, 1e-5
"""a larger epsilon than Adam's own, which would make steps of equal size out of rounding"""
Routing = list[list[Tensor]]
"""[M][L] ids [T, K] of this rank"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank and device of this process."""

    rank: int
    num_ranks: int
    device: torch.device
    control: Any
    """a gloo group of all ranks, for the host"""

    def gather(self, values: list[float]) -> NDArray[np.float64]:
        """[ranks, values] of every rank."""
        every: list[Any] = [None] * self.num_ranks
        torch.distributed.all_gather_object(every, values, group=self.control)
        return np.array(every)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        self.wait()
        torch.distributed.barrier(group=self.control)


def join(num_ranks: int, device: torch.device) -> None:
    """Megatron's process groups over the world: all ranks are one expert-parallel group."""
    if device.type == "cpu":
        from tests.megatron_core import shims  # noqa: PLC0415

        shims.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.core.tensor_parallel import layers  # noqa: PLC0415
        from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # an undefined name of 0.16 where Transformer Engine is missing
    layers.fused_weight_gradient_mlp_cuda = _AddedInTorch
    layers._grad_accum_fusion_available = True  # noqa: SLF001
    parallel_state.initialize_model_parallel(
        expert_tensor_parallel_size=1, expert_model_parallel_size=num_ranks, create_gloo_process_groups=False
    )
    if device.type == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415

        model_parallel_cuda_manual_seed(1)


class _AddedInTorch:
    """Apex's kernel for dense weights, in torch's operations: a product, then a sum in float32."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(gradient.t() @ rows)


@dataclass(frozen=True, kw_only=True)
class Took:
    """One optimizer step."""

    loss: float
    """loss of this rank, summed over micro-batches"""
    seconds: float
    plan_s: float
    """part of `seconds` until the plan was ready"""


class Training:
    """One model, its optimizer, and, if balanced, its balancer."""

    def __init__(self, case: Case, shape: Shape, place: Place) -> None:
        self.case, self.shape, self.place = case, shape, place
        self.config = _config(case, shape, place)
        if case.kind == "layer":
            self.bare: nn.Module = _layer(self.config, case, place)
            self.layers: list[Any] = [self.bare]
        else:
            self.bare = _gpt(self.config, case, shape, place)
            self.layers = [layer.mlp for layer in self.bare.decoder.layers]  # type: ignore[union-attr]
        _fill(self.bare, place)
        self.model, self.optimizer = self._wrapped()
        self.balancer: Any = None
        self.steps: list[Any] = []
        self._prepared: dict[int, Any] = {}
        self._begun = 0

    def _wrapped(self) -> tuple[Any, Any]:
        if self.case.kind == "layer":
            return self.bare, torch.optim.Adam(self.bare.parameters(), lr=LEARNING_RATE, eps=EPSILON)
        from megatron.core.distributed import (  # noqa: PLC0415
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415
        from megatron.core.transformer.module import Float16Module  # noqa: PLC0415

        short = self.config.bf16
        wrap = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=short)
        inner = Float16Module(self.config, self.bare) if short else self.bare
        model = DistributedDataParallel(self.config, wrap, inner)
        setting = OptimizerConfig(
            optimizer="adam", lr=LEARNING_RATE, adam_eps=EPSILON, use_distributed_optimizer=True, clip_grad=1.0,
            bf16=short, params_dtype=self.config.params_dtype,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model, get_megatron_optimizer(setting, [model], use_gloo_process_groups=False)

    def balance(self, setting: MegatronSetting) -> Training:
        """Switch to planned execution."""
        optimizer = None if self.case.kind == "layer" else self.optimizer
        self.balancer = balance(self.model, setting, optimizer=optimizer)
        return self

    def record(self, spans: Spans) -> Training:
        """Record the experts of every layer, with what their copies wait for."""
        for layer in self.layers:
            own = layer.experts.forward

            def forward(rows: Tensor, counts: Tensor, probs: Tensor, own: Any = own) -> Any:  # noqa: ANN401
                return spans.around(lambda part: own(part, counts, probs)[0], rows), None

            object.__setattr__(layer.experts, "forward", forward)
        return self

    def step(self, number: int, routing: Routing, following: Routing | None = None) -> Took:
        """One optimizer step. following: routing of the next step, planned in the background as this one runs."""
        self.place.meet()
        start = perf_counter()
        if self.balancer is not None:
            with record_function("begin"):
                self.steps.append(self.balancer.begin(self._prepared.pop(number, routing)))
            if following is not None:
                with record_function("prepare"):
                    self._prepared[number + 1] = self.balancer.prepare(following)
        planned = perf_counter()
        loss = self._layer_step(routing) if self.case.kind == "layer" else self._gpt_step(number, routing)
        self.place.wait()
        end = perf_counter()
        self._begun = 0
        for layer in self.layers:
            layer.router.router_replay.clear_indices()
        return Took(loss=float(loss), seconds=end - start, plan_s=planned - start)

    def _layer_step(self, routing: Routing) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.place.device)
        for number, ids in enumerate(routing):
            hidden, wanted = _hidden(self.shape, self.config.params_dtype, self.place, number)
            self._replay(ids)
            out, _ = self.bare(hidden.requires_grad_())
            loss = ((out - wanted).float() ** 2).mean() / len(routing)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total

    def _gpt_step(self, number: int, routing: Routing) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=lambda _data, model: self._replayed(model, number, routing), data_iterator=iter(()),
            model=[self.model], num_microbatches=len(routing), seq_length=self.shape.sequence,
            micro_batch_size=self.shape.sequences, forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        return float(sum(one["loss"] for one in losses) / len(losses))

    def _replayed(self, model: Any, number: int, routing: Routing) -> Any:  # noqa: ANN401
        """A forward step as RL frameworks have it: the recorded experts, then what backward computes anew."""
        self._replay(routing[self._begun])
        out = model(*_tokens(self.shape, self.place, number, self._begun))
        self._act("REPLAY_BACKWARD")
        self._begun += 1
        return out, lambda tensor: (tensor.mean(), {"loss": tensor.detach().mean()})

    def _replay(self, ids: list[Tensor]) -> None:
        """Make routers choose these experts without synchronising with the device."""
        self._act("REPLAY_FORWARD")
        for layer, of_layer in zip(self.layers, ids, strict=True):
            layer.router.router_replay.set_target_indices(of_layer)

    def _act(self, action: str) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction  # noqa: PLC0415

        for layer in self.layers:
            layer.router.router_replay.set_router_replay_action(RouterReplayAction[action])

    @property
    def copies(self) -> Any:  # noqa: ANN401
        """The copies shared by all layers, if the balancer has made them."""
        return getattr(getattr(self.balancer, "copies", None), "found", None)

    def close(self) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: PLC0415

        if self.balancer is not None:
            self.balancer.end()
            if copies := self.copies:
                copies.close()
        RouterReplay.clear_global_router_replay_instances()
        self.__dict__.clear()


def _config(case: Case, shape: Shape, place: Place) -> Any:  # noqa: ANN401
    from megatron.core.distributed import finalize_model_grads  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415

    dtype = getattr(torch, case.dtype)
    full: dict[str, Any] = {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
    }  # fmt: skip
    return TransformerConfig(
        num_layers=1 if case.kind == "layer" else shape.num_layers, hidden_size=shape.hidden,
        num_attention_heads=shape.heads, kv_channels=shape.head_width, ffn_hidden_size=shape.expert_ffn,
        moe_ffn_hidden_size=shape.expert_ffn, num_moe_experts=shape.num_experts, moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        moe_enable_routing_replay=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, use_cpu_initialization=place.device.type == "cpu", perform_initialization=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=case.fused, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype is torch.bfloat16, expert_model_parallel_size=place.num_ranks,
        expert_tensor_parallel_size=1, finalize_model_grads_func=finalize_model_grads,
        **(full if case.recompute else {}),
    )  # fmt: skip


def _layer(config: Any, case: Case, place: Place) -> nn.Module:  # noqa: ANN401
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: PLC0415
    from megatron.core.transformer.spec_utils import build_module  # noqa: PLC0415

    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    _choose_experts(spec, case)
    layer: Any = build_module(spec, config=config)
    layer.set_layer_number(1)
    return layer.to(place.device)  # type: ignore[no-any-return]


def _gpt(config: Any, case: Case, shape: Shape, place: Place) -> nn.Module:  # noqa: ANN401
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        _choose_experts(spec.submodules.mlp, case)
        model = GPTModel(
            config, spec, vocab_size=shape.vocabulary, max_sequence_length=shape.sequence,
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
    return model.to(place.device)  # type: ignore[no-any-return]


def _choose_experts(spec: Any, case: Case) -> None:  # noqa: ANN401
    from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: PLC0415

    if case.experts == "grouped":
        spec.submodules.experts = ModuleSpec(module=GroupedExperts)


@torch.no_grad()
def _fill(module: nn.Module, place: Place) -> None:
    """Fill weights by name and rank only, so that all models of a case start equal."""
    generator = torch.Generator(place.device)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        own = place.rank if ".experts." in f".{name}" else 0
        generator.manual_seed(zlib.crc32(f"{own} {name}".encode()))
        values = torch.randn(parameter.shape, generator=generator, device=place.device)
        parameter.copy_(values * parameter.shape[-1] ** -0.5)


def _hidden(shape: Shape, dtype: torch.dtype, place: Place, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Input and target output of a single layer."""
    generator = torch.Generator(place.device).manual_seed(1000 * place.rank + micro_batch)
    size = (2, shape.sequence, shape.sequences, shape.hidden)
    both = torch.randn(size, generator=generator, device=place.device).to(dtype)
    return both[0], both[1]


def _tokens(shape: Shape, place: Place, number: int, micro_batch: int) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """Tokens, positions, the causal mask, no embeddings, labels."""
    rng = np.random.default_rng([5, number, micro_batch, place.rank])
    ids = torch.from_numpy(rng.integers(shape.vocabulary, size=(shape.sequences, shape.sequence + 1))).to(place.device)
    ones = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool, device=place.device)
    positions = torch.arange(shape.sequence, device=place.device).expand(shape.sequences, -1)
    return ids[:, :-1].contiguous(), positions, ones.triu(1)[None, None], None, ids[:, 1:].contiguous()
