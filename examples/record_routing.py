"""From what rollout engines return to a recording that `equilibra simulate` reads.

Here the engines' answers are made up, in exactly their shapes; in a rollout they come from vLLM, SGLang, verl or slime.
"""

import base64
import tempfile
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from equilibra.integrations import sglang, slime, verl, vllm
from equilibra.integrations.routing_formats import RoutedModel, save_sequences
from equilibra.trace.open import load_trace

# The engines have a column for every layer; the dense ones, here the first, are columns of zeros and are left out.
# model_from_folder("/models/qwen3-30b-a3b") reads all this from config.json.
MODEL = RoutedModel(num_layers=5, top_k=6, num_experts=64, dense_layers=(0,))
random = np.random.default_rng(0)


def made_up(tokens: int) -> np.ndarray:
    ids = np.argsort(random.random((tokens - 1, MODEL.num_layers, MODEL.num_experts)), axis=2)[..., : MODEL.top_k]
    ids[:, 0] = 0  # the dense layer
    return ids


# vLLM, built with enable_return_routed_experts: routed_experts of every CompletionOutput
answer = SimpleNamespace(index=0, token_ids=[0] * 200, routed_experts=made_up(300).astype(np.uint8))
from_vllm = vllm.sequences_of_outputs([SimpleNamespace(prompt_token_ids=[0] * 100, outputs=[answer])], MODEL)

# SGLang: server --enable-return-routed-experts, request return_routed_experts; the answer of /generate
text = base64.b64encode(made_up(200).astype(np.int32).tobytes()).decode()
meta_info = {"prompt_tokens": 50, "completion_tokens": 150, "routed_experts": text}
from_sglang = sglang.sequences_of_response({"text": "", "meta_info": meta_info}, MODEL)

# verl: a DataProto, or a table with its tensors; zeros where nothing was written
batch = {"routed_experts": np.zeros((2, 256, 5, 6), np.int16), "attention_mask": np.zeros((2, 256), int)}
batch["prompts"] = np.zeros((2, 40), int)
for row, tokens in enumerate((256, 90)):
    batch["routed_experts"][row, : tokens - 1], batch["attention_mask"][row, :tokens] = made_up(tokens), 1
from_verl = verl.sequences_of_batch(batch, MODEL)

# slime: its samples
sample = {"tokens": [0] * 77, "response_length": 37, "rollout_routed_experts": made_up(77).astype(np.int32)}
from_slime = slime.sequences_of_samples([sample], MODEL)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "rollout.npz"
    save_sequences(chain(from_vllm, from_sglang, from_verl, from_slime), path, MODEL)
    back = load_trace(path)
    print(f"{back.num_sequences} sequences, {back.num_tokens} tokens, {back.tokens_without_routing} without routing")
    print("save yours to a folder that stays, then: equilibra simulate --trace rollout.npz --nodes 2 --report")
