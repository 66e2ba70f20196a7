"""What Megatron-Core takes from Transformer Engine under tensor and context parallelism, for tests on CPUs.

Without it, Megatron's norm refuses sequence parallelism and its attention refuses context parallelism. Two modules
stand in for them; all else of a model is Megatron's own.

Symbols: S tokens of a sequence, s those on this rank, B sequences, A heads of this rank, H width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Norm(torch.nn.LayerNorm):
    """Its parameters are marked, so that Megatron sums their gradients over the ranks that share a sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def positions(context: int, length: int) -> list[Tensor]:
    """Positions on every context-parallel rank, as Megatron cuts sequences: an early and a late of 2 x context chunks.

    Without context parallelism, all in order.
    """
    chunks = torch.arange(length).chunk(2 * context)
    return [torch.cat([chunks[rank], chunks[2 * context - 1 - rank]]) for rank in range(context)]


def attention_class() -> type:
    """Causal attention of this rank's tokens to the keys and values of the whole sequence."""
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.module import MegatronModule

    class ContextAttention(MegatronModule):
        def __init__(self, config: Any, *_arguments: Any, **_options: Any) -> None:
            super().__init__(config)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            group = groups.get_context_parallel_group()
            at = positions(group.size(), len(query) * group.size())
            query_BAsH = query.permute(1, 2, 0, 3)
            key_BASH, value_BASH = (
                gather_from_sequence_parallel_region(one, group=group).permute(1, 2, 0, 3) for one in (key, value)
            )
            causal_sS = at[group.rank()][:, None] >= torch.cat(at)[None, :]
            out = functional.scaled_dot_product_attention(query_BAsH, key_BASH, value_BASH, attn_mask=causal_sS)
            return out.permute(2, 0, 1, 3).flatten(2)

    return ContextAttention


def block_of(layer: Any, settings: Any) -> Any:
    """The block of layers of a pipeline stage with stand-ins where Transformer Engine's modules would be."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if settings.context_parallel_size > 1:
        parts.self_attention.submodules.core_attention = attention_class()
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(settings), layer_norm=Norm)
