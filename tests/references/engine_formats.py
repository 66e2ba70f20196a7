"""Routing as inference engines and RL frameworks report it, built to their formats from known routing."""

import base64
import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from equilibra.integrations.routing_formats import RoutedModel

MODEL = RoutedModel(num_layers=5, top_k=3, num_experts=16, dense_layers=(0, 3))


@dataclass(frozen=True)
class Known:
    """A sequence whose routing is known."""

    prompt: int
    answer: int
    ids: np.ndarray
    """[tokens - 1, MoE layers, k]"""

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.answer


def known(prompt: int, answer: int, *, seed: int = 0, model: RoutedModel = MODEL) -> Known:
    random = np.random.default_rng([seed, prompt, answer])
    order = np.argsort(random.random((prompt + answer - 1, len(model.moe_layers), model.num_experts)), axis=-1)
    return Known(prompt, answer, order[..., : model.top_k])


def columns(one: Known, dtype: Any = np.uint8, *, model: RoutedModel = MODEL) -> np.ndarray:
    """[tokens - 1, layers, k] with columns of zeros for dense layers, as engines keep them."""
    full = np.zeros((len(one.ids), model.num_layers, model.top_k), dtype)
    full[:, list(model.moe_layers)] = one.ids
    return full


def npy_base64(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def vllm_output(ones: list[Known], *, first: int = 0, dtype: Any = np.uint8) -> Any:
    """A RequestOutput: one prompt, some answers."""
    answers = [
        SimpleNamespace(
            index=number, text="", token_ids=list(range(one.answer)), cumulative_logprob=None, logprobs=None,
            routed_experts=columns(one, dtype)[first:], finish_reason="stop", stop_reason=None,
        )
        for number, one in enumerate(ones)
    ]  # fmt: skip
    return SimpleNamespace(request_id="0", prompt_token_ids=list(range(ones[0].prompt)), outputs=answers, finished=True)


def vllm_response(
    ones: list[Known], *, first: int = 0, token_ids: bool = False, model: RoutedModel = MODEL
) -> dict[str, Any]:
    """A body of /v1/completions."""
    choices: list[dict[str, Any]] = [
        {"index": n, "text": "", "finish_reason": "stop",
         "routed_experts": npy_base64(columns(one, model=model)[first:]),
         "token_ids": list(range(one.answer)) if token_ids else None}
        for n, one in enumerate(ones)
    ]  # fmt: skip
    total = sum(one.answer for one in ones)
    usage = {"prompt_tokens": ones[0].prompt, "completion_tokens": total, "total_tokens": ones[0].prompt + total}
    return {"id": "cmpl-0", "object": "text_completion", "choices": choices, "usage": usage}


def vllm_021_response(one: Known) -> dict[str, Any]:
    """A body of vLLM 0.21: prompt and answer apart, as lists, MoE layers only."""
    body = vllm_response([one])
    body["prompt_routed_experts"] = one.ids[: one.prompt].tolist()
    body["choices"][0]["routed_experts"] = one.ids[one.prompt :].tolist()
    return body


def sglang_result(one: Known, *, first: int = 0, model: RoutedModel = MODEL) -> dict[str, Any]:
    """A body of /generate."""
    content = columns(one, np.int32, model=model)[first:].tobytes()
    meta = {
        "id": "0", "finish_reason": {"type": "stop", "matched": 0}, "prompt_tokens": one.prompt,
        "completion_tokens": one.answer, "cached_tokens": 0, "routed_experts": base64.b64encode(content).decode(),
    }  # fmt: skip
    return {"text": "", "output_ids": list(range(one.answer)), "meta_info": meta}


def sglang_choice(one: Known, *, before_0_5_9: bool = False) -> dict[str, Any]:
    """A body of SGLang's /v1/completions."""
    result = sglang_result(one)["meta_info"]
    usage = {"prompt_tokens": one.prompt, "completion_tokens": one.answer}
    if not before_0_5_9:
        return {"choices": [{"index": 0}], "usage": usage, "sglext": {"routed_experts": result["routed_experts"]}}
    return {"choices": [{"index": 0, "sgl_ext": {"routed_experts": result["routed_experts"]}}], "usage": usage}


def verl_batch(ones: list[Known], *, prompt_width: int, response_width: int) -> Any:
    """A DataProto: prompts padded left, responses right, zeros where nothing was written."""
    width = prompt_width + response_width
    routed = np.zeros((len(ones), width, MODEL.num_layers, MODEL.top_k), np.int16)
    mask = np.zeros((len(ones), width), np.int64)
    for row, one in enumerate(ones):
        start = prompt_width - one.prompt
        mask[row, start : prompt_width + one.answer] = 1
        routed[row, start : start + len(one.ids)] = columns(one, np.int16)
    tensors = {"routed_experts": routed, "attention_mask": mask, "prompts": np.zeros((len(ones), prompt_width), int)}
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": np.array(["a", "a", "b"][: len(ones)], object)})


def slime_sample(one: Known, group: int) -> Any:
    return SimpleNamespace(
        group_index=group, index=0, tokens=list(range(one.num_tokens)), response_length=one.answer,
        rollout_routed_experts=columns(one, np.int32),
    )  # fmt: skip


def nemo_batch(ones: list[Known], *, width: int) -> dict[str, Any]:
    """A BatchedDataDict: padded on the right with experts 0, 1, ..., the last token too."""
    filler = np.arange(MODEL.top_k)
    routed = np.tile(filler, (len(ones), width, MODEL.num_layers, 1)).astype(np.int32)
    for row, one in enumerate(ones):
        routed[row, : len(one.ids)] = columns(one, np.int32)
    lengths = np.array([one.num_tokens for one in ones])
    return {"input_ids": np.zeros((len(ones), width), int), "input_lengths": lengths, "routed_experts": routed}
