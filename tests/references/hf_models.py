"""Small models of all supported families, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
                  "head_dim": 8, "mlp_only_layers": [1], "intermediate_size": 24, "tie_word_embeddings": True},
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": {"intermediate_size": 24, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2,
                    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8, "num_key_value_heads": 4},
    "gpt_oss": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8,
                "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "rope_scaling": None},
}  # fmt: skip


def small_config(family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **{**SMALL, **CONFIGS[family]})


def save_small(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Draw a model, save it, and give it back."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(small_config(family), dtype=dtype).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name:  # transformers starts biases at zero, which would hide mistakes
                value.normal_(std=0.2)
    model.save_pretrained(folder)
    return model
