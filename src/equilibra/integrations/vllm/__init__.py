"""Read routing that vLLM reports, in process and over HTTP. Only the engine imports vLLM, when it starts.

With `enable_return_routed_experts`, `CompletionOutput.routed_experts` is [prompt + answer - 1, layers, k], uint8 or
uint16; it starts later where the request sets `routed_experts_prompt_start`. Over HTTP every choice has it as the
base64 of an .npy. vLLM 0.21 splits it into `prompt_routed_experts` of the request and `routed_experts` of the answer,
over HTTP as lists; rows that its prefix cache dropped are -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations import routing_formats as formats
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, located

__all__ = ["sequences_of_outputs", "sequences_of_response"]


def sequences_of_outputs(outputs: Iterable[Any], model: RoutedModel, *, first: int = 0) -> Iterator[RoutedSequence]:
    """The sequences of vLLM's `RequestOutput`s, one at a time. first: the requests' `routed_experts_prompt_start`."""
    for number, output in enumerate(outputs):
        if output.prompt_token_ids is None:
            raise InputError(f"request {number} has no prompt_token_ids: ask vLLM with token ids instead of text")
        for answer in output.outputs:
            with located(f"request {number}, answer {answer.index}"):
                yield _sequence(
                    model, answer.routed_experts, getattr(output, "prompt_routed_experts", None),
                    len(output.prompt_token_ids), len(answer.token_ids), first,
                )  # fmt: skip


def sequences_of_response(
    response: Mapping[str, Any], model: RoutedModel, *, first: int = 0
) -> Iterator[RoutedSequence]:  # fmt: skip
    """The sequences of all choices in a response of vLLM's HTTP server, to a completion or a chat."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise InputError(f"a vLLM response must have a list of choices, each a table, not {choices!r:.60}")
    usage = formats.table_in(response, "usage")
    for number, choice in enumerate(choices):
        with located(f"choice {number}"):
            prompt = _length(choice, "prompt_token_ids", _length(response, "prompt_token_ids", None))
            alone = formats.count_in(usage, "completion_tokens") if len(choices) == 1 else None
            yield _sequence(
                model, choice.get("routed_experts"), response.get("prompt_routed_experts"),
                formats.count_in(usage, "prompt_tokens") if prompt is None else prompt,
                _length(choice, "token_ids", alone), first,
            )  # fmt: skip


def _sequence(
    model: RoutedModel, answer: Any, prompt: Any, prompt_length: int | None, answer_length: int | None, first: int  # noqa: ANN401
) -> RoutedSequence:  # fmt: skip
    """One answer. answer, prompt: routing in any encoding. Lengths in tokens, None where unknown."""
    num_tokens = None if prompt_length is None or answer_length is None else prompt_length + answer_length
    if answer is None:
        if num_tokens is None:
            raise InputError("there is no routing and no number of tokens: ask for return_token_ids, or for n = 1")
        return formats.align(None, model, num_tokens=num_tokens, prompt_length=prompt_length)
    rows = _rows(answer)
    if prompt is not None:
        rows, first = _joined(_rows(prompt), rows, prompt_length, answer_length), 0
    return formats.align(rows, model, num_tokens=num_tokens, first=first, prompt_length=prompt_length)


def _joined(
    prompt: NDArray[np.integer[Any]], answer: NDArray[np.integer[Any]], prompt_length: int | None,
    answer_length: int | None,
) -> NDArray[np.integer[Any]]:  # fmt: skip
    """The two parts of vLLM 0.21 as one, without a row for the last token."""
    if prompt_length is not None and len(prompt) != prompt_length:
        raise InputError(f"there is routing of {len(prompt)} tokens of a prompt of {prompt_length}: all are needed")
    if answer_length is not None and len(answer) == answer_length:
        answer = answer[:-1]
    if len(answer) == 0:
        return prompt
    if prompt.shape[1:] != answer.shape[1:]:
        raise InputError(f"routing of the prompt has shape {prompt.shape}, of the answer {answer.shape}")
    return np.concatenate([prompt, answer])


def _rows(value: object) -> NDArray[np.integer[Any]]:
    return formats.as_rows(formats.from_npy(formats.from_base64(value)) if isinstance(value, str | bytes) else value)


def _length(table: Mapping[str, Any], name: str, otherwise: int | None) -> int | None:
    """Length of a list of token ids; `otherwise` if there is none."""
    value = table.get(name)
    if value is None:
        return otherwise
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list of tokens, not {value!r:.60}")
    return len(value)
