"""vLLM: its routing as sequences, and the engine inside the training processes. vLLM is imported when it is started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import as_rows, count_in, from_base64, from_npy, located, table_in
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence, Rows, align, unrecorded

__all__ = ["sequences_of_outputs", "sequences_of_response"]

# Routing that vLLM reports, in process and over HTTP.
#
# With `enable_return_routed_experts`, `CompletionOutput.routed_experts` is [prompt + answer - 1, layers, k], uint8 or
# uint16, or starts later where the request says `routed_experts_prompt_start`. Over HTTP it is the base64 of an .npy
# in
# every choice. vLLM 0.21 splits it: `prompt_routed_experts` of the request and `routed_experts` of the answer alone,
# over HTTP as lists; rows that its prefix cache has forgotten are -1.


def sequences_of_outputs(outputs: Iterable[Any], model: RoutedModel, *, first: int = 0) -> Iterator[RoutedSequence]:
    """The sequences of vLLM's `RequestOutput`s, as they come. first: what `routed_experts_prompt_start` was."""
    for number, output in enumerate(outputs):
        if output.prompt_token_ids is None:
            raise InputError(f"request {number}: vLLM does not say its prompt's tokens; ask with prompt_token_ids")
        for answer in output.outputs:
            with located(f"request {number}, answer {answer.index}"):
                yield _sequence(
                    _Answer(
                        answer=answer.routed_experts, prompt=getattr(output, "prompt_routed_experts", None),
                        prompt_length=len(output.prompt_token_ids), answer_length=len(answer.token_ids), first=first,
                    ),
                    model,
                )  # fmt: skip


def sequences_of_response(
    response: Mapping[str, Any], model: RoutedModel, *, first: int = 0
) -> Iterator[RoutedSequence]:  # fmt: skip
    """The sequences of one response of vLLM's HTTP server, completions or chat, all of its choices."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise InputError("a response of vLLM has a list of choices, and this has none")
    usage = table_in(response, "usage")
    for number, choice in enumerate(choices):
        with located(f"choice {number}"):
            prompt = _length(choice, "prompt_token_ids", _length(response, "prompt_token_ids", None))
            alone = count_in(usage, "completion_tokens") if len(choices) == 1 else None
            yield _sequence(
                _Answer(
                    answer=choice.get("routed_experts"), prompt=response.get("prompt_routed_experts"),
                    prompt_length=count_in(usage, "prompt_tokens") if prompt is None else prompt,
                    answer_length=_length(choice, "token_ids", alone), first=first,
                ),
                model,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What is known of one answer."""

    answer: Any
    prompt: Any
    prompt_length: int | None
    answer_length: int | None
    first: int


def _sequence(said: _Answer, model: RoutedModel) -> RoutedSequence:
    lengths = (said.prompt_length, said.answer_length)
    num_tokens = None if None in lengths else sum(length or 0 for length in lengths)
    if said.answer is None:
        if num_tokens is None:
            raise InputError("there is no routing and no number of tokens: ask for return_token_ids, or for n = 1")
        return unrecorded(num_tokens, model, prompt_length=said.prompt_length)
    values, first = _rows(said.answer), said.first
    if said.prompt is not None:
        values, first = _joined(_rows(said.prompt), values, said), 0
    rows = Rows(values=values, num_tokens=num_tokens, first=first, prompt_length=said.prompt_length)
    return align(rows, model)


def _rows(value: object) -> NDArray[np.integer[Any]]:
    """Base64 of an .npy, or an array or lists."""
    return as_rows(from_npy(from_base64(value)) if isinstance(value, str | bytes) else value)


def _joined(prompt: NDArray[np.integer[Any]], answer: NDArray[np.integer[Any]], said: _Answer) -> NDArray[Any]:
    """The two parts of vLLM 0.21, without a row for the last token if there is one."""
    if said.prompt_length is not None and len(prompt) != said.prompt_length:
        raise InputError(f"routing of {len(prompt)} tokens of a prompt of {said.prompt_length} came: all are needed")
    if said.answer_length is not None and len(answer) == said.answer_length:
        answer = answer[:-1]
    if len(answer) == 0:
        return prompt
    if prompt.shape[1:] != answer.shape[1:]:
        raise InputError(f"routing of the prompt is of shape {prompt.shape}, that of the answer of {answer.shape}")
    return np.concatenate([prompt, answer])


def _length(table: Mapping[str, Any], name: str, otherwise: int | None) -> int | None:
    """Length of a list of token ids, if it is there."""
    value = table.get(name)
    if value is None:
        return otherwise
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list of tokens, not {value!r:.60}")
    return len(value)
