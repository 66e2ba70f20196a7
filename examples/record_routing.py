"""From what rollout engines return to a recording that `equilibra simulate` reads.

Here the engines' answers are made up, in exactly their shapes; in a rollout they come from vLLM, SGLang, verl or slime.
"""

import base64
import tempfile
from pathlib import Path

import numpy as np

from equilibra.trace.open import load_trace, save_trace
from equilibra.trace.routing import RoutingTrace

NUM_EXPERTS, TOP_K, HIDDEN_LAYERS = 64, 6, 5
MOE_LAYERS = [1, 2, 3, 4]  # dense layers have a column of zeros in the engines' answers: leave them out
random = np.random.default_rng(0)


def recording(routed: list[np.ndarray]) -> RoutingTrace:
    """One sequence after another. The last token of a sequence was never routed, so engines return one row less."""
    rows, recorded = [], []
    for ids in routed:  # [tokens - 1, hidden layers, k]
        moe = ids[:, MOE_LAYERS]
        rows.append(np.concatenate([moe, moe[-1:]]))  # any ids will do for a token that is not recorded
        recorded.append(np.arange(len(moe) + 1) < len(moe))
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])])
    ids = np.concatenate(rows).astype(np.uint8 if NUM_EXPERTS <= 256 else np.uint16)
    return RoutingTrace(ids=ids, offsets=offsets, num_experts=NUM_EXPERTS, recorded=np.concatenate(recorded))


def made_up(tokens: int) -> np.ndarray:
    ids = np.argsort(random.random((tokens - 1, HIDDEN_LAYERS, NUM_EXPERTS)), axis=2)[..., :TOP_K]
    ids[:, 0] = 0  # the dense layer
    return ids


# vLLM, built with enable_return_routed_experts: routed_experts of every CompletionOutput
vllm = [made_up(300).astype(np.uint8), made_up(120).astype(np.uint8)]

# SGLang: server --enable-return-routed-experts, request return_routed_experts; meta_info["routed_experts"]
meta_info = {"routed_experts": base64.b64encode(made_up(200).astype(np.int32).tobytes()).decode()}
flat = np.frombuffer(base64.b64decode(meta_info["routed_experts"]), np.int32)
sglang = [flat.reshape(-1, HIDDEN_LAYERS, TOP_K)]

# verl: batch.batch["routed_experts"] [batch, prompt + response, layers, k], zero where attention_mask is 0
routed_experts, attention_mask = np.zeros((2, 256, HIDDEN_LAYERS, TOP_K), np.int16), np.zeros((2, 256), bool)
for row, tokens in enumerate((256, 90)):
    routed_experts[row, : tokens - 1], attention_mask[row, :tokens] = made_up(tokens), True
verl = [routed_experts[row][attention_mask[row]][:-1] for row in range(2)]

# slime: sample.rollout_routed_experts [tokens - 1, layers, k] of every sample
slime = [made_up(77).astype(np.int32)]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "rollout.npz"
    save_trace(recording([*vllm, *sglang, *verl, *slime]), path)
    back = load_trace(path)
    unrecorded = back.num_tokens - int(np.count_nonzero(back.recorded))
    print(f"{back.num_sequences} sequences, {back.num_tokens} tokens, {unrecorded} without routing (their last ones)")
    print("save yours to a folder that stays, then: equilibra simulate --trace rollout.npz --nodes 2 --report")
