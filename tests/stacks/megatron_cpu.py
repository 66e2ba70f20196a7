"""Megatron-Core 0.16.1 and mbridge 0.15.1 on CPUs with gloo, in a training worker of verl, in float32.

`tests/megatron_core/shims.py` says what of Megatron has to be told otherwise. Its P7 is not a TorchFunctionMode here:
functions are replaced, since modes belong to a thread, and Ray runs the methods of verl's workers in another thread
than their constructor. Layers are Megatron's own in place of Transformer Engine's, with attention that knows packed
sequences.
"""

from __future__ import annotations

import functools
import warnings
from itertools import pairwise
from typing import Any

import torch
from tests.megatron_core import shims
from torch import Tensor

MAKE_TENSORS = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "zeros_like",
    "ones_like", "empty_like", "full_like", "eye",
)  # fmt: skip


@functools.cache
def install() -> None:
    """Once in a process, before its model is built."""
    torch.set_num_threads(1)
    shims._torch()
    _literals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shims._megatron()
        _bridge()
        _engine()
        _checkpoints()


def _literals() -> None:
    """P7, and what verl asks of devices beyond Megatron."""
    torch._dynamo.config.disable = True  # Megatron's jit_fuser compiles nothing
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    torch.cuda.manual_seed = lambda *_: None
    for name in MAKE_TENSORS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    to, kind = Tensor.to, Tensor.type

    def to_cpu(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        arguments = tuple("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in arguments)
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = torch.device("cpu")
        return to(self, *arguments, **options)

    def type_of(self: Tensor, *arguments: Any, **options: Any) -> Any:
        return kind(self, *arguments, **options) if arguments or options else shims.KINDS.get(self.dtype) or kind(self)

    Tensor.to, Tensor.type = to_cpu, type_of
    Tensor.cuda = Tensor.pin_memory = torch.nn.Module.cuda = lambda self, *_, **__: self
    Tensor.record_stream = lambda self, *_, **__: None


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def made(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return made


class Norm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


def packed_attention() -> type:
    from megatron.core.transformer.module import MegatronModule

    class PackedAttention(MegatronModule):
        """Causal attention with grouped queries inside every sequence of a pack."""

        def __init__(self, config: Any, *_arguments: Any, **_options: Any) -> None:
            super().__init__(config)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
            ends, parts = packed_seq_params.cu_seqlens_q.tolist(), []
            for start, end in pairwise(ends):
                q, k, v = (one[start:end].transpose(0, 1)[None] for one in (query, key, value))
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                parts.append(out[0].transpose(0, 1).reshape(end - start, -1))
            if ends[-1] < query.shape[0]:
                parts.append(query.new_zeros(query.shape[0] - ends[-1], parts[0].shape[1]))
            return torch.cat(parts)

    return PackedAttention


def _bridge() -> None:
    """mbridge's bridge for Qwen3-MoE with Megatron's local layers, whose parameters have other names."""
    from mbridge.core import register_model
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    @register_model("qwen3_moe")
    class CpuBridge(Qwen3MoEBridge):
        def _build_config(self) -> Any:
            hf = self.hf_config
            return self._build_base_config(
                moe_ffn_hidden_size=hf.moe_intermediate_size, moe_router_topk=hf.num_experts_per_tok,
                num_moe_experts=hf.num_experts, moe_aux_loss_coeff=0.0, moe_router_load_balancing_type="none",
                moe_grouped_gemm=False, moe_router_score_function="softmax", moe_router_pre_softmax=False,
                qk_layernorm=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
                use_cpu_initialization=False, moe_router_dtype="fp32",
            )  # fmt: skip

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

            self.has_vp_stage = True
            layer = get_gpt_layer_local_spec(
                num_experts=self.config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True,
                normalization="RMSNorm",
            )  # fmt: skip
            attention = layer.submodules.self_attention.submodules
            attention.core_attention, attention.q_layernorm, attention.k_layernorm = packed_attention(), Norm, Norm
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            layers = [layer] * get_num_layers_to_build(self.config)
            return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)

        def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            first = self.mpu.ep_rank * (self.config.num_moe_experts // self.mpu.ep_size) if consider_ep else 0
            return {local: _name_in_te(name, first) for local, name in names.items()}


def _name_in_te(name: str, first_expert: int) -> str:
    """The name that a parameter of Megatron's local layers has in Transformer Engine's."""
    if ".mlp.experts." in name:
        left, _, rest = name.partition(".local_experts.")
        expert, part, kind = rest.split(".")
        name = f"{left}.{part}.{kind}{int(expert) + first_expert}"
    return name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")


def _engine() -> None:
    """verl's engine, registered for the device "cpu" too; in float32, which McoreEngineConfig refuses by name."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine, MegatronEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(MegatronEngineWithLMHead)
    build = MegatronEngine._build_tf_config

    def in_float32(self: Any) -> None:
        object.__setattr__(self.engine_config, "dtype", "float32")
        build(self)

    MegatronEngine._build_tf_config = in_float32


def _checkpoints() -> None:
    """What loading needs beyond P9 of the shims.

    torch's Adam has no state before its first step. In float32 the optimizer's masters are the weights, which autograd
    protects while they are loaded. Random states are CUDA's, so there are none, and verl refuses that (P8).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    shard = DistributedOptimizer.sharded_state_dict

    def with_state(self: Any, *arguments: Any, **options: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.zeros(()), **moments)
        return shard(self, *arguments, **options)

    DistributedOptimizer.sharded_state_dict = with_state
    MegatronEngine.load_checkpoint = torch.no_grad()(MegatronEngine.load_checkpoint)
    MegatronCheckpointManager.load_rng_states = lambda *_, **__: None
