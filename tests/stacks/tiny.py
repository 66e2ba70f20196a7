"""`python -m tests.stacks.tiny FOLDER`: a random Qwen3-MoE, a byte tokenizer and questions, as verl reads them.

The tokenizer fills the vocabulary, as verl masks logits beyond it. The padding row of the embedding is not zero: it
would have gradients of 1/sqrt(eps) where a random model samples it. Heads have 32 channels, the fewest of vLLM on CPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SPECIALS = 64
VOCABULARY = 256 + SPECIALS
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    others = ["<|im_start|>", *(f"<|unused{number}|>" for number in range(SPECIALS - 3))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=others
    )
    tokenizer.chat_template = TEMPLATE
    assert len(tokenizer) == VOCABULARY
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder: Path, tokenizer: Any) -> None:
    """Experts are narrower than dense layers would be, as in real models."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, decoder_sparse_step=1,
        mlp_only_layers=[], router_aux_loss_coef=0.0, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.1)
    model.save_pretrained(folder)


def save_questions(folder: Path) -> None:
    """As many prompts as a dozen steps of four take, all different: the seed of an answer follows from its prompt."""
    import pandas as pd

    rows = [
        {
            "data_source": "tiny", "ability": "math", "prompt": [{"role": "user", "content": f"add {a} and {b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)}, "extra_info": {"index": 8 * a + b},
        }
        for a in range(6) for b in range(8)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    save_model(into / "model", save_tokenizer(into / "model"))
    save_questions(into)
