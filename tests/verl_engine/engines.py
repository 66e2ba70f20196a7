"""A small actor in verl's own Megatron engine, on CPUs: verl's code but for how the model is made.

verl makes models from Hugging Face checkpoints with Megatron-Bridge, which needs Transformer Engine. Here two of its
methods make the tests' GPTModel instead, with an attention that knows packed sequences and a norm that knows sequence
parallelism (Megatron's own are Transformer Engine's). Micro-batches, replay, packing, schedules, losses, optimizer and
offloading are verl's and Megatron's.

Symbols: S sequences of a rank, L layers, K experts per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.megatron_core import models
from torch import Tensor
from torch.nn import functional

PROMPT, RESPONSE, SEQUENCES, LAYERS = 4, 10, 8, 2
TOKENS_PER_MICRO_BATCH = 24
CONTENTS = ["model", "optimizer"]


def engine_class(verl: Any) -> type:
    """verl's actor engine, with models of the tests."""

    class TinyEngine(verl.MegatronEngineWithLMHead):
        def _build_tf_config(self) -> None:
            from megatron.core.distributed import finalize_model_grads

            self.is_value_model = self.model_config.model_type == "value_model"
            self.share_embeddings_and_output_weights = False
            self.param_dtype = self.dtype = torch.float32
            self.bridge = self.provider = self.peft_cls = None
            chunks = self.engine_config.virtual_pipeline_model_parallel_size
            interleaved = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            self.tf_config = models.config(
                LAYERS, finalize_model_grads_func=finalize_model_grads, variable_seq_lengths=True,
                virtual_pipeline_model_parallel_size=chunks, **(interleaved if chunks else {}),
                **self.engine_config.override_transformer_config,
            )  # fmt: skip

        def _build_megatron_module(self) -> list[Any]:
            from megatron.core import parallel_state as groups
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

            wrap = DistributedDataParallelConfig(use_distributed_optimizer=True, **self._resolve_override_ddp_config())
            chunks = []
            for chunk in range(self.engine_config.virtual_pipeline_model_parallel_size or 1):
                stage = {"ignore_virtual": False, "vp_stage": chunk}
                first, last = groups.is_pipeline_first_stage(**stage), groups.is_pipeline_last_stage(**stage)
                model = gpt(self.tf_config, pre=first, post=last, chunk=chunk)
                chunks.append(DistributedDataParallel(self.tf_config, wrap, model))
                chunks[-1].broadcast_params()
            return chunks

    return TinyEngine


def gpt(settings: Any, *, pre: bool, post: bool, chunk: int = 0) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = get_gpt_layer_local_spec(num_experts=settings.num_moe_experts, moe_grouped_gemm=False)
        layer.submodules.self_attention.submodules.core_attention = packed_attention()
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        stage = None if settings.virtual_pipeline_model_parallel_size is None else chunk
        layers = [layer] * get_num_layers_to_build(settings, vp_stage=stage)
        model = GPTModel(
            settings, TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm), vocab_size=models.VOCABULARY,
            max_sequence_length=PROMPT + RESPONSE, pre_process=pre, post_process=post,
            share_embeddings_and_output_weights=False, position_embedding_type="none", vp_stage=stage,
        )  # fmt: skip
    models.fill(model, 1 + chunk)
    return model


class ByRank:
    """Exports like mbridge and Megatron-Bridge: what is in a slot of all ranks is gathered, and numbered by rank."""

    def export_weights(self, chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
        from megatron.core import parallel_state as groups

        group = groups.get_expert_model_parallel_group()
        for number, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                head, at, tail = name.partition("local_experts.")
                if not at:
                    yield f"{number}.{name}", parameter.detach().clone()
                    continue
                slot, _, part = tail.partition(".")
                every = [torch.empty_like(parameter) for _ in range(group.size())]
                torch.distributed.all_gather(every, parameter.detach(), group=group)
                for rank, weights in enumerate(every):
                    expert = int(slot) + rank * models.NUM_EXPERTS // group.size()
                    yield f"{number}.{head}{expert}.{part}", weights


class Norm(torch.nn.RMSNorm):
    """Without parameters: Megatron's own, where Transformer Engine is missing, refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, elementwise_affine=False)


def packed_attention() -> type:
    """Causal attention inside every sequence of a pack, one after another; keys and values of context ranks gathered.

    Every context rank has two parts of each sequence, one from either end, as verl cuts them.
    """
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.module import MegatronModule

    class PackedAttention(MegatronModule):
        def __init__(self, config: Any, *_arguments: Any, **_options: Any) -> None:
            super().__init__(config)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
            group, parts = groups.get_context_parallel_group(), []
            every = [gather_from_sequence_parallel_region(one, group=group).chunk(group.size()) for one in (key, value)]
            for start, end in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
                mine = slice(start // group.size(), end // group.size())
                places = [_places(end - start, rank, group.size()) for rank in range(group.size())]
                order = torch.cat(places).argsort()
                k, v = (torch.cat([one[mine] for one in of_ranks])[order].transpose(0, 1)[None] for of_ranks in every)
                before = places[group.rank()][:, None] >= torch.arange(end - start)
                out = functional.scaled_dot_product_attention(query[mine].transpose(0, 1)[None], k, v, attn_mask=before)
                parts.append(out[0].transpose(0, 1).flatten(1))
            return torch.cat(parts)

    return PackedAttention


def _places(length: int, rank: int, size: int) -> Tensor:
    """Where a sequence's rows of a context rank are in it."""
    if size == 1:
        return torch.arange(length)
    part = torch.arange(length // (2 * size))
    return torch.cat([part + at * len(part) for at in (rank, 2 * size - 1 - rank)])


def make(verl: Any, *, expert_parallel: int = 2, **options: Any) -> Any:
    """An engine that is initialised. options: of McoreEngineConfig."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import EngineRouterReplayConfig, McoreEngineConfig, McoreOptimizerConfig

    replay = EngineRouterReplayConfig(mode=options.pop("mode", "R3"))
    model_type = options.pop("model_type", "language_model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = McoreEngineConfig(
            expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=1,
            router_replay=replay,
            use_dist_checkpointing=True,
            **options,
        )
    hf_config = SimpleNamespace(architectures=["Tiny"], model_type="tiny")
    model = SimpleNamespace(
        model_type=model_type, hf_config=hf_config, architectures=["Tiny"], local_path=None, lora={},
        mtp=SimpleNamespace(enable=False, enable_train=False), tokenizer=SimpleNamespace(pad_token_id=0),
        get_processor=lambda: None,
    )  # fmt: skip
    # a larger epsilon: Adam would make steps of equal size out of rounding
    optimizer = McoreOptimizerConfig(
        lr=0.01,
        total_training_steps=10,
        lr_warmup_steps=0,
        weight_decay=0.0,
        override_optimizer_config={"adam_eps": 1e-5},
    )
    engine = engine_class(verl)(
        model, config, optimizer, CheckpointConfig(save_contents=CONTENTS, load_contents=CONTENTS)
    )
    engine.initialize()
    engine.bridge, engine.vanilla_bridge = ByRank(), True
    return engine


def routing(seed: int, rank: int, length: int, skew: float = 2.0) -> Tensor:
    """[length, L, K] int16, as rollouts record it; the last token has none."""
    layers = models.routing(seed, rank, 1, LAYERS, length, skew)[0]
    ids = torch.stack(layers, dim=1).to(torch.int16)
    ids[-1] = 0
    return ids


def batch(number: int, *, replay: bool = True, routed: Any = True, **others: Any) -> Any:
    """A batch of this data-parallel rank as verl's trainer sends it: padded, then through verl's own function.

    routed: whether there is routing of a rollout; or the routing, jagged, as R2 has recorded it.
    """
    from megatron.core import parallel_state as groups
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rank = groups.get_data_parallel_rank()
    rng = np.random.default_rng([9, number, rank])
    width = PROMPT + RESPONSE
    mask = torch.zeros(SEQUENCES, width, dtype=torch.long)
    ids = torch.from_numpy(rng.integers(1, models.VOCABULARY, size=(SEQUENCES, width)))
    experts = torch.zeros(SEQUENCES, width, LAYERS, models.TOP_K, dtype=torch.int16)
    for s in range(SEQUENCES):
        start, end = int(rng.integers(PROMPT)), PROMPT + int(rng.integers(2, RESPONSE + 1))
        mask[s, start:end] = 1
        experts[s, start:end] = routing(1000 * number + s % 2, 100 * rank + s, end - start)
    tensors = {
        "input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "prompts": (ids * mask)[:, :PROMPT], "responses": (ids * mask)[:, PROMPT:], "response_mask": mask[:, PROMPT:],
        "old_log_probs": torch.from_numpy(rng.normal(-3.4, 0.1, (SEQUENCES, RESPONSE))).float(),
        "advantages": torch.from_numpy(rng.normal(size=(SEQUENCES, RESPONSE))).float(),
    }  # fmt: skip
    if routed is True:
        tensors["routed_experts"] = experts
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=[SEQUENCES]))
    tu.assign_non_tensor(
        data, temperature=1.0, **({"use_dynamic_bsz": True, "max_token_len_per_gpu": TOKENS_PER_MICRO_BATCH} | others),
        use_fused_kernels=False, enable_routing_replay=replay, calculate_entropy=True, global_batch_size=None,
    )  # fmt: skip
    if torch.is_tensor(routed):
        data["routed_experts"] = routed
    return data


def loss() -> Any:
    """verl's own loss of PPO."""
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = McoreActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return partial(ppo_loss, config)


def update(engine: Any, number: int, **options: Any) -> dict[str, Any]:
    """One optimizer step as verl's worker makes it: loaded, trained, offloaded."""
    with engine.train_mode():
        return engine.train_batch(batch(number, **options), loss_function=loss())


def export(engine: Any, *, by_rank: bool = False) -> dict[str, Tensor]:
    """Weights as verl's worker sends them to rollouts. by_rank: as if homes were where plain Megatron puts them."""
    if engine.module[0].ddp_config.overlap_param_gather:  # the next forward would gather them
        engine.module[0].start_param_sync(force_sync=True)
    tensors, _ = type(engine).get_per_tensor_param(engine) if by_rank else engine.get_per_tensor_param()
    found = {name: tensor.clone() for name, tensor in tensors}
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    return found


def log_prob(engine: Any, number: int, **options: Any) -> dict[str, Any]:
    """Log-probabilities as verl's worker computes them."""
    with engine.eval_mode():
        return engine.infer_batch(batch(number, **options))


def of_responses(number: int, output: dict[str, Any]) -> Any:
    """As verl's trainer takes them: the last token's would be of the first token of the sequence packed after it."""
    from verl.workers.utils.padding import no_padding_2_padding

    return no_padding_2_padding(output["model_output"]["log_probs"], batch(number)).numpy()
